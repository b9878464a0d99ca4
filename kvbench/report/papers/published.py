"""Published tables: what the papers printed, and which of their rows a run of ours belongs to."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from statistics import fmean

import yaml

from kvbench.core.config import ConfigError
from kvbench.runs.record.results import Results

TOLERANCE = 0.05
"""Largest relative distance of a run's budget from a row's: HeatKV's "10 %" was 650 of 6425 tokens per head, 10.1 %."""
STEP_FIGURES = ("utilisation", "density", "lse")
"""Plots of what runs held step by step (`kvbench.report.figures.step_plots`)."""
FIGURES = ("fidelity", "stability", *STEP_FIGURES)
"""Plots that a table may name (`kvbench.report.figures.plots`, and those of steps)."""
COSTS: Mapping[str, Callable[[Results], float | None]] = {
    "cache MiB": lambda run: run.memory.paper_peak_mib,
    "cache 1000 MiB": lambda run: run.memory.paper_peak_mib / 1000,
    "cache GiB": lambda run: run.memory.paper_peak_mib / 1024,
    "images/s": lambda run: run.latency.images_per_second,
    "tokens/s": lambda run: run.latency.tokens_per_second,
    "SU %": lambda run: None if run.memory.utilisation is None else 100 * run.memory.utilisation,
    "tokens kept": lambda run: average(step.held for step in run.steps),
    "LSE": lambda run: average(step.lse for step in run.steps),
    "LSE kept": lambda run: average(step.kept_lse for step in run.steps),
    "LSE drift": lambda run: run.memory.lse_drift,
}
"""Published columns that are no metrics of ours."""


@dataclass(frozen=True)
class PublishedRow:
    """One row of one model.

    Attributes:
        where: by key, the settings a run must have, any one of them; no entry where any value will do.
        cells: by metric, the number as printed, or what stood in its place; None where nothing was given.
    """

    where: Mapping[str, tuple[str, ...]]
    cells: Mapping[str, str | None]


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper.

    Attributes:
        name: as in the file and in the key `published`.
        source: paper and number of the table.
        title: what it is about.
        data: what was generated or measured on.
        keys: settings that identify rows, as dotted paths of a configuration (or of results.json).
        metrics: columns.
        models: rows by model; words in brackets after its name are a prompt set, or a setting of the paper.
        fixed: settings that all rows share.
        also: metrics of ours that are shown although the paper lacks them.
        figure: plot that belongs to it.
        budgets: by model, what a row's budget is of all that the model caches, where the paper counts otherwise.
        sources: of a table put together from several sources, where each has its numbers and its protocol, by the words
            in brackets after a model's name; no entry in a table of one paper.
    """

    name: str
    source: str
    title: str
    data: str
    keys: tuple[str, ...]
    metrics: tuple[str, ...]
    models: Mapping[str, tuple[PublishedRow, ...]]
    fixed: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    figure: str | None = None
    budgets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def labels(self, models: Sequence[str], prompts: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the published columns to show beside runs of `models` on `prompts`.

        Theirs if the paper has all of these models, else every one; of those, theirs if it has all these prompt sets.
        """
        own = tuple(label for label in self.models if model_of(label) in models)
        shown = own if {model_of(label) for label in own} == set(models) else tuple(self.models)
        same = tuple(label for label in shown if prompts_of(label) in prompts)
        return same if same and {prompts_of(label) for label in same} == set(prompts) else shown

    def cell(self, label: str, where: Mapping[str, tuple[str, ...]], metric: str) -> str | None:
        """Return what the paper gives for a row of one model, None if nothing."""
        found = [row.cells[metric] for row in self.models[label] if row.where == where]
        return found[0] if found else None

    def rows(self) -> list[Mapping[str, tuple[str, ...]]]:
        """Return the settings of all rows, in the order of the paper; models share them."""
        every = [row.where for rows in self.models.values() for row in rows]
        return [where for i, where in enumerate(every) if where not in every[:i]]

    def matches(self, where: Mapping[str, tuple[str, ...]], run: Results) -> bool:
        """Return whether a run has a row's settings and those that all rows share.

        A full cache is no measure of another model's: of a table of several sources, the run's model must be there too.
        """
        if self.sources and run.model_label not in map(model_of, self.models):
            return False
        wanted = {**{key: (value,) for key, value in self.fixed.items()}, **where}
        shares = self.budgets.get(run.model, {})
        return all(
            any(
                _agrees(key, find_setting(run, key), shares.get(v, v) if key == "budget" else v)
                for v in values
            )
            for key, values in wanted.items()
        )


def model_of(label: str) -> str:
    """Return the model's name out of a column's label."""
    return label.split(" ", 1)[0]


def prompts_of(label: str) -> str:
    """Return the prompt set in brackets behind the model's name of a column's label.

    >>> prompts_of("qwen3_8b (aime24, upper block)")
    'aime24'
    """
    return label.partition(" ")[2].strip("()").partition(",")[0]


def find_setting(run: Results, key: str) -> object:
    """Return `method`, `budget` (fraction of the full cache), `latency.batch` or a setting of a run, no `auto`.

    Papers count tokens: a budget in bytes is no number here, so that it belongs to no row of theirs.
    """
    if key == "method":
        return run.method
    if key == "budget":
        return run.memory.budget if run.memory.budget_unit == "tokens" else run.memory.budget_text
    if key == "cuda_graph" and run.setting(key) == "auto":
        return (run.provenance or {}).get(key) == "on"
    return run.latency.batch if key == "latency.batch" else run.setting(key)


def average(values: Iterable[float | None]) -> float | None:
    """Return the mean of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def parse_number(text: str | None) -> float | None:
    """Return a printed cell's number; None for what is none, such as OOM."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def find(name: str, key: str = "published") -> PublishedTable:
    """Return a table by name.

    Args:
        name: as in the file.
        key: config key to name in the error.

    Raises:
        ConfigError: there is none.
    """
    tables = load()
    if name not in tables:
        raise ConfigError(f"{key}={name}: no such table; choose from {', '.join(tables)}")
    return tables[name]


@lru_cache
def load() -> dict[str, PublishedTable]:
    """Return all tables of the file that comes with the package."""
    return parse((files("kvbench") / "assets" / "published.yaml").read_text(encoding="utf-8"))


def parse(text: str) -> dict[str, PublishedTable]:
    """Read a file of tables; numbers stay the text that was printed.

    Raises:
        ConfigError: naming the table, and the row where it is one, that does not fit.
    """
    try:
        values = yaml.load(text, yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"published.yaml: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(values, Mapping):
        raise ConfigError("published.yaml: must hold tables by name")
    return {str(name): _parse_table(str(name), node) for name, node in values.items()}


def _parse_table(name: str, node: object) -> PublishedTable:
    if not isinstance(node, Mapping):
        raise ConfigError(f"published.yaml: {name}: must be a mapping")
    needed = ("source", "title", "data", "keys", "metrics", "models")
    missing = [key for key in needed if not node.get(key)]
    unknown = [key for key in node if key not in (*needed, "fixed", "also", "figure", "budgets", "sources")]
    if missing or unknown:
        raise ConfigError(f"published.yaml: {name}: missing {missing}, unknown {unknown}")
    if node.get("figure") not in (None, *FIGURES):
        raise ConfigError(
            f"published.yaml: {name}: figure={node['figure']}: must be one of {', '.join(FIGURES)}"
        )
    keys, metrics, sources = tuple(node["keys"]), tuple(node["metrics"]), dict(node.get("sources", {}))
    if sources and (off := {*map(prompts_of, node["models"])} ^ {*sources}):
        raise ConfigError(f"published.yaml: {name}: sources and models' names disagree about {sorted(off)}")
    return PublishedTable(
        name=name,
        keys=keys,
        metrics=metrics,
        models={
            label: tuple(
                _parse_row(f"{name}: {label}, row {i}", row, keys, metrics) for i, row in enumerate(rows)
            )
            for label, rows in node["models"].items()
        },
        fixed=dict(node.get("fixed", {})),
        also=tuple(node.get("also", ())),
        figure=node.get("figure"),
        budgets=dict(node.get("budgets", {})),
        sources=sources,
        **{key: str(node[key]) for key in ("source", "title", "data")},
    )


def _parse_row(place: str, values: object, keys: tuple[str, ...], metrics: tuple[str, ...]) -> PublishedRow:
    if not isinstance(values, list) or len(values) != len(keys) + len(metrics):
        raise ConfigError(f"published.yaml: {place}: needs {len(keys)} settings and {len(metrics)} cells")
    settings, cells = values[: len(keys)], values[len(keys) :]
    if not all(isinstance(cell, str) for cell in cells):
        raise ConfigError(f"published.yaml: {place}: a cell must be one number or word")
    return PublishedRow(
        {
            key: tuple(value) if isinstance(value, list) else (value,)
            for key, value in zip(keys, settings, strict=True)
            if value != "null"
        },
        {metric: None if cell == "null" else cell for metric, cell in zip(metrics, cells, strict=True)},
    )


def _agrees(key: str, actual: object, wanted: str) -> bool:
    expected = parse_number(wanted)
    if expected is None or not isinstance(actual, int | float):
        return (str(actual).lower() if isinstance(actual, bool) else str(actual)) == wanted
    if key == "budget":
        return abs(actual - expected) <= TOLERANCE * expected
    return actual == expected
