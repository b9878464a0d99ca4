"""Published tables of papers, and their rows that match a measured run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from importlib.resources import files
from itertools import starmap
from statistics import fmean
from typing import Any, TypeVar

import yaml

from kvbench.core.config import ConfigError
from kvbench.core.suggestions import suggest
from kvbench.report.timings import Timing
from kvbench.runs.record.results import Results

TOLERANCE = 0.05
"""Maximum relative difference of budgets: HeatKV's "10 %" is 650 of 6425 tokens per head, 10.1 %."""
COSTS: Mapping[str, Callable[[Results], float | None]] = {
    "cache MiB": lambda run: run.memory.paper_peak_mib,
    "cache 1000 MiB": lambda run: run.memory.paper_peak_mib / 1000,
    "cache GiB": lambda run: run.memory.paper_peak_mib / 1024,
    "images/s": lambda run: run.latency.images_per_second,
    "tokens/s": lambda run: run.latency.tokens_per_second,
    "latency s": lambda run: run.latency.seconds_per_image * run.latency.batch,
    "SU %": lambda run: None if run.memory.utilisation is None else 100 * run.memory.utilisation,
    "tokens kept": lambda run: average(step.held for step in run.steps),
    "LSE": lambda run: average(step.lse for step in run.steps),
    "LSE kept": lambda run: average(step.kept_lse for step in run.steps),
    "LSE drift": lambda run: run.memory.lse_drift,
}
"""Published columns of memory and time, which are not metrics of a run."""
OF_PROCESS = ("memory GB", "saving %", "images/s", "tokens/s", "latency s")
"""Published columns that depend on a paper's GPU, batch and code."""
LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
"""YAML loader of the tables: libyaml's, which is faster, if PyYAML has it, else the one in Python."""
Settings = Mapping[str, tuple[str, ...]]
"""Accepted values by setting; a row of a table matches a run that has one of them for each setting."""
Run = TypeVar("Run", bound=Results | Timing)


@dataclass(frozen=True)
class PublishedRow:
    """One row of one model.

    Attributes:
        where: settings of the row; a setting that may have any value is left out.
        cells: number or word by metric, as printed; None for an empty cell.
    """

    where: Settings
    cells: Mapping[str, str | None]


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper.

    Attributes:
        name: name as in the file and in the key `published`.
        source: paper and number of the table.
        title: subject of the table.
        data: prompts or data set of the paper.
        keys: settings that identify rows, as dotted paths of a configuration (or of results.json).
        metrics: columns.
        models: rows by label, which is a model's name, then a prompt set or a setting of the paper in brackets.
        fixed: settings that all rows share.
        also: further metrics to show, which the paper lacks.
        figure: name of the plot that belongs to the table: fidelity, stability, or one of `CURVES` in figures/lines.py.
        budgets: shares of the full cache by model and printed budget, where the paper counts differently.
        sources: protocols of a table compiled from several papers, by the source in a label's brackets; empty for one
            paper.
    """

    name: str
    source: str
    title: str
    data: str
    keys: tuple[str, ...]
    metrics: tuple[str, ...]
    models: Mapping[str, tuple[PublishedRow, ...]]
    fixed: Mapping[str, str] = field(default_factory=dict)
    also: Sequence[str] = ()
    figure: str | None = None
    budgets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def labels(self, models: Sequence[str], prompts: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the published columns to compare with runs of `models` on `prompts`.

        These are the columns of the models if the paper has all of them, otherwise all columns; among them only those
        of the prompt sets if the paper has all of these.
        """
        of_models = tuple(label for label in self.models if model_of(label) in models)
        shown = of_models if {model_of(label) for label in of_models} == set(models) else tuple(self.models)
        same = tuple(label for label in shown if prompts_of(label) in prompts)
        return same if same and {prompts_of(label) for label in same} == set(prompts) else shown

    def cell(self, label: str, where: Settings, metric: str) -> str | None:
        """Return the printed cell of a row in the columns of a label; None if it is empty or missing."""
        return next((row.cells[metric] for row in self.models[label] if row.where == where), None)

    @cached_property
    def rows(self) -> list[Settings]:
        """Settings of all rows in the paper's order, each once for all models."""
        every = [row.where for rows in self.models.values() for row in rows]
        return [where for i, where in enumerate(every) if where not in every[:i]]

    def find_rows(self, run: Results | Timing) -> list[int]:
        """Return the indices in `rows` of the rows that a run matches, in their settings and in `fixed`.

        A table of several sources must also contain the run's model, as full caches of different models do not compare.
        A run of random weights needs a column of memory or time.
        """
        if self.sources and run.model_label not in map(model_of, self.models):
            return []
        if not self.find_compared(run):
            return []
        find = cache(partial(find_setting, run))
        shares = {"budget": self.budgets.get(run.model, {})}

        def agrees(key: str, values: Iterable[str]) -> bool:
            printed = (shares.get(key, {}).get(value, value) for value in values)
            return any(_equals(key, find(key), value) for value in printed)

        if not all(agrees(key, (value,)) for key, value in self.fixed.items()):
            return []
        return [index for index, where in enumerate(self.rows) if all(starmap(agrees, where.items()))]

    def match(self, runs: Sequence[Run]) -> list[tuple[Settings, Run]]:
        """Return the runs that match rows in the table's order, each with the settings of its row."""
        matches = sorted((row, index) for index, run in enumerate(runs) for row in self.find_rows(run))
        return [(self.rows[row], runs[index]) for row, index in matches]

    def find_compared(self, run: Results | Timing) -> list[str]:
        """Return the columns that compare with a run: without scores if its weights are random."""
        is_random = run.model_label != run.model
        return [name for name in self.metrics if not is_random or name in (*COSTS, *OF_PROCESS)]


def model_of(label: str) -> str:
    """Return the model's name from the label of a column."""
    return label.split(" ", 1)[0]


def prompts_of(label: str) -> str:
    """Return the prompt set in brackets from a column's label.

    >>> prompts_of("qwen3_8b (aime24, upper block)")
    'aime24'
    """
    return label.partition(" ")[2].strip("()").partition(",")[0]


def find_setting(run: Results | Timing, key: str) -> object:
    """Return `method`, `budget` (fraction of the full cache), `latency.batch` or a setting of a run, `auto` resolved.

    Papers count tokens, so a budget in bytes is returned as a string, which matches no row.
    """
    if isinstance(run, Timing):
        return run.find_setting(key)
    if key == "method":
        return run.method
    if key == "budget":
        return run.memory.budget if run.memory.budget_unit == "tokens" else run.memory.budget_text
    if key == "cuda_graph" and run.setting(key) == "auto":
        return (run.provenance or {}).get(key) == "on"
    return run.latency.batch if key == "latency.batch" else run.setting(key)


def average(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def parse_number(text: str | None) -> float | None:
    """Return the number of a printed cell; None for a word such as OOM."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def find(name: str, key: str = "published") -> PublishedTable:
    """Return a table by name; errors name the configuration's `key`.

    Raises:
        ConfigError: there is no such table.
    """
    tables = load()
    if name not in tables:
        raise ConfigError(f"{key}={name}: no such table{suggest(name, tables)}")
    return tables[name]


@cache
def load() -> dict[str, PublishedTable]:
    """Return all tables of the package's published.yaml."""
    return parse((files("kvbench") / "assets" / "published.yaml").read_text(encoding="utf-8"))


def parse(text: str) -> dict[str, PublishedTable]:
    """Parse a file of tables; numbers stay strings, as printed."""
    return {name: _make_table(name, **node) for name, node in yaml.load(text, LOADER).items()}


def _make_table(
    name: str, *, keys: list[str], metrics: list[str], models: Mapping[str, list[list[Any]]], **fields: Any
) -> PublishedTable:
    """Return a table; `fields` are the other attributes, as the file has them."""
    rows = {label: tuple(_make_row(row, keys, metrics) for row in values) for label, values in models.items()}
    return PublishedTable(name=name, keys=tuple(keys), metrics=tuple(metrics), models=rows, **fields)


def _make_row(values: list[Any], keys: list[str], metrics: list[str]) -> PublishedRow:
    where = {
        key: tuple(value) if isinstance(value, list) else (value,)
        for key, value in zip(keys, values, strict=False)
        if value != "null"
    }
    printed = (None if cell == "null" else cell for cell in values[len(keys) :])
    return PublishedRow(where, dict(zip(metrics, printed, strict=True)))


def _equals(key: str, actual: object, printed: str) -> bool:
    expected = parse_number(printed)
    if expected is None or not isinstance(actual, int | float):
        return (str(actual).lower() if isinstance(actual, bool) else str(actual)) == printed
    if key == "budget":
        return abs(actual - expected) <= TOLERANCE * expected
    return actual == expected
