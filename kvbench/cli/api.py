"""`kvbench.run` and `kvbench.compare`: runs and their paired differences in Python, with typed results and frames."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig

from kvbench.cli.config.command import Command, write_value
from kvbench.cli.config.compose import compose_job, hydra_of_kvbench
from kvbench.cli.config.instantiate import allow_targets
from kvbench.cli.config.loader import forget_edited_files
from kvbench.cli.config.messages import EXPECTED, describe_error
from kvbench.cli.config.search_path import PluginSearchPath, check_search_path
from kvbench.cli.config.words import check_words
from kvbench.cli.tasks.complete import complete
from kvbench.core.config import ConfigError, UserError
from kvbench.data.frames import import_polars, samples_df
from kvbench.eval.protocol.compare import compare_runs
from kvbench.eval.protocol.scores import Metric
from kvbench.report.memory import name_time, write_in_use
from kvbench.report.tables import Row, Shown
from kvbench.runs.record.results import Latency, Memory, Results
from kvbench.runs.record.samples import find_sample, read_finished

if TYPE_CHECKING:
    import polars as pl


DIFFERENCES = "paired differences with 95 % intervals"
"""Title of a table of paired differences."""


@dataclass(frozen=True, repr=False)
class Run(Shown):
    """A finished run; printed, or shown in a notebook, it lists its memory, time and metrics.

    Attributes:
        folder: the run's folder.
        results: its results.json.
        reused: whether the run was already finished.

    Examples:
        >>> import kvbench
        >>> mine = kvbench.run("snapkv", budget=0.1, prompts={"count": 4}, eval=["psnr"])
        >>> mine.metrics["psnr"].n, mine.memory.exceeded, len(mine.samples)
        (4, False, 4)
        >>> kvbench.Run.read(mine.folder) == mine
        True
    """

    folder: Path
    results: Results
    reused: bool = field(default=False, compare=False)

    @classmethod
    def read(cls, folder: Path | str) -> "Run":
        """Read a finished run from its folder.

        Raises:
            ConfigError: the folder holds no finished run, or its results are damaged.
        """
        path = Path(folder).expanduser()
        results = read_finished(path)
        if results is None:
            raise ConfigError(f"{path}: is not the folder of a finished run; finish it, or name another")
        return cls(path, results, reused=True)

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Metrics by name, each with its 95 % interval."""
        return self.results.metrics

    @property
    def memory(self) -> Memory:
        """Tokens and bytes of the cache, with the budget."""
        return self.results.memory

    @property
    def latency(self) -> Latency:
        """Wall-clock times of generation."""
        return self.results.latency

    @property
    def reference(self) -> "Run | None":
        """The uncompressed run that metrics compare with; None for such a run itself."""
        name = self.results.reference
        return None if name is None else Run.read(self.folder.parent / name)

    @cached_property
    def samples(self) -> "pl.DataFrame":
        """Prompt, costs and metrics, a row per sample (`kvbench.samples_df`)."""
        return samples_df([self.folder])

    def find_sample(self, index: int) -> Path:
        """Return the path of the image or text of the prompt at an index."""
        return find_sample(self.folder, index)

    def _list_rows(self) -> tuple[str, list[Row]]:
        results, memory = self.results, self.results.memory
        costs = {
            "run": results.run,
            "n": str(results.n),
            "budget": results.budget_text,
            "peak": f"{100 * memory.peak:.2f} %",
            "in use": write_in_use(memory, memory.least_share),
            "bytes": str(memory.sequence_bytes),
            name_time([results]): f"{results.latency.seconds_per_image:.3f}{results.latency.mark}",
        }
        return str(self.folder), [{**costs, **_choose_shown(results.metrics)}]


@dataclass(frozen=True, repr=False)
class Difference(Shown):
    """Paired difference of two runs over the same samples.

    Attributes:
        run: the run.
        to: the run that is subtracted.
        metrics: differences by metric, `run` minus `to`, each with its 95 % interval.
    """

    run: Run
    to: Run
    metrics: Mapping[str, Metric]

    def _list_rows(self) -> tuple[str, list[Row]]:
        ours, other = self.run.results, self.to.results
        return DIFFERENCES, [
            {"run": ours.run, "minus": other.run, "n": str(ours.n), **_choose_shown(self.metrics)}
        ]


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """Paired differences between runs; printed, or shown in a notebook, it lists them by metric.

    Attributes:
        differences: one difference per run, in order.
    """

    differences: tuple[Difference, ...]

    @cached_property
    def frame(self) -> "pl.DataFrame":
        """Differences with the ends `low` and `high` of their intervals, a row per run and metric."""
        rows: list[dict[str, object]] = []
        for one in self.differences:
            ours, other = one.run.results, one.to.results
            about = {
                "model": ours.model,
                "method": ours.method,
                "to_method": other.method,
                "budget": round(ours.memory.budget, 6),
                "budget_unit": ours.memory.budget_unit,
                "seed": ours.setting("seed"),
                "run": ours.run,
                "to_run": other.run,
            }
            for name, metric in one.metrics.items():
                low, high = metric.ci95 or (None, None)
                kind = {"n": metric.n, "unit": metric.unit, "better": metric.better, "detail": metric.detail}
                value = {"difference": metric.value, "low": low, "high": high}
                rows.append({**about, "metric": name, **value, **kind})
        return import_polars().DataFrame(rows, infer_schema_length=None)

    def _list_rows(self) -> tuple[str, list[Row]]:
        rows = [row for one in self.differences for row in one._list_rows()[1]]
        names = dict.fromkeys(name for row in rows for name in row)
        return DIFFERENCES, [{name: row.get(name) for name in names} for row in rows]


def run(
    method: str | Mapping[str, object] | None = None, *, overrides: Sequence[str] = (), **settings: object
) -> Run:
    """Complete a run, its reference and its calibration, and return it; a finished run is found again.

    Keywords are keys of the configuration (`python run.py --help`). A name chooses a file of a group
    (`model="var_tiny"`), a list the files of `eval`, and a mapping sets values of a group (`prompts={"count": 8}`);
    for both, give the values with dots: `run("heatkv", **{"method.sinks": 2})`. Runs are written to `runs_dir`, by
    default `runs` in the current folder, as by the command line.

    Args:
        method: name of the method, or settings for `full`; None for the method that `overrides` name, or `full`.
        overrides: overrides as on the command line, such as `"prompts.count=8"`; keywords take precedence.
        **settings: values by key.

    Returns:
        The finished run.

    Raises:
        UserError: a setting is wrong, weights are missing, or a method exceeds its budget; the message is one line.
        OSError: an error of the disk.

    Examples:
        >>> import kvbench
        >>> run = kvbench.run("streaming_llm", budget=0.1, prompts={"count": 4}, eval=["psnr"])
        >>> run.results.method, run.results.n, run.memory.budget
        ('streaming_llm', 4, 0.1)
    """
    if method is None and not any(word.startswith("method=") for word in overrides):
        method = "full"
    named = {} if method is None else {"method": method}
    words = [*overrides, *write_overrides({**named, **settings})]
    check_words(Command.parse(words))
    with _composing(words) as cfg:
        if cfg.get("task") != "run":
            raise ConfigError(
                f"task={cfg.get('task')}: kvbench.run generates and scores; use the command line"
            )
        outcome = complete(cfg)
    assert outcome.results is not None
    return Run(outcome.folder, outcome.results, outcome.reused)


def compare(runs: "Iterable[Run | Path | str]", to: "Run | Path | str") -> Comparison:
    """Return the paired differences of runs to one method, or to one run, with 95 % intervals.

    Samples of one prompt have the same noise, so a paired difference varies less than either value. A run is compared
    with the run of method `to` that has the same model, reference (so the same prompts and seed), budget and number
    of samples. Runs without such a partner are left out.

    Args:
        runs: finished runs or their folders; runs of method `to` are the partners of all other runs.
        to: name of a method; or one run or its folder, with which all runs are compared at any budget.

    Raises:
        ConfigError: a folder holds no finished run, no run has the method, or a run has several partners.
        SampleSetError: runs have different samples.

    Examples:
        >>> import kvbench
        >>> settings = {"budget": 0.1, "prompts": {"count": 4}, "eval": ["psnr"]}
        >>> runs = [kvbench.run(method, **settings) for method in ("random", "snapkv")]
        >>> frame = kvbench.compare(runs, to="random").frame
        >>> frame.filter(metric="psnr")["method"].to_list()
        ['snapkv']
    """
    chosen = [one if isinstance(one, Run) else Run.read(one) for one in runs]
    named = isinstance(to, str) and (_has(chosen, to) or not Path(to).expanduser().is_dir())
    pairs = _pair_by_method(chosen, str(to)) if named else _pair_with(chosen, to)
    if not pairs:
        name = to.results.run if isinstance(to, Run) else to
        raise ConfigError(
            f"to={name}: no run has a partner with the same model, reference, budget and samples"
        )
    return Comparison(
        tuple(Difference(ours, other, compare_runs(ours.folder, other.folder)) for ours, other in pairs)
    )


def write_overrides(settings: Mapping[str, object]) -> list[str]:
    """Return settings as overrides, one per value of a mapping; raise ConfigError for values of other types.

    >>> write_overrides({"method": "heatkv", "budget": 0.1, "prompts": {"count": 8}, "eval": ["psnr", "ssim"]})
    ['method=heatkv', 'budget=0.1', 'prompts.count=8', 'eval=[psnr,ssim]']
    """
    words: list[str] = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            words += write_overrides({f"{key}.{name}": inner for name, inner in value.items()})
        else:
            try:
                words.append(f"{key}={write_value(value)}")
            except TypeError as error:
                problem = f"{error} is not a value of a setting; give a string, a number, a list or a mapping"
                raise ConfigError(f"{key}: {problem}") from None
    return words


@contextmanager
def _composing(words: list[str]) -> Iterator[DictConfig]:
    """Compose a job; raise errors that a user can cause as one-line exceptions."""
    Plugins.instance().register(PluginSearchPath)
    forget_edited_files()  # a notebook's user edits them between calls
    try:
        with allow_targets(), hydra_of_kvbench():
            check_search_path()
            yield compose_job(words)[0]
    except EXPECTED as error:
        if isinstance(error, UserError | OSError) and not isinstance(error, HydraException):
            raise error from None
        raise ConfigError(describe_error(error, words)) from None


def _pair_by_method(runs: Sequence[Run], method: str) -> list[tuple[Run, Run]]:
    if not _has(runs, method):
        methods = ", ".join(sorted({one.results.method for one in runs})) or "none"
        raise ConfigError(f"to={method}: no run has that method or name; there are {methods}")
    pairs = []
    for one in runs:
        chosen = [other for other in runs if _has([other], method) and _place(other) == _place(one)]
        if len({other.folder.resolve() for other in chosen}) > 1:
            names = ", ".join(other.results.run for other in chosen)
            raise ConfigError(f"to={method}: several runs match {one.results.run}; give one of {names}")
        if chosen and one not in chosen:
            pairs.append((one, chosen[0]))
    return pairs


def _pair_with(runs: Sequence[Run], to: "Run | Path | str") -> list[tuple[Run, Run]]:
    other = to if isinstance(to, Run) else Run.read(to)
    return [(one, other) for one in runs if one.results.reference is not None and one != other]


def _place(one: Run) -> tuple[object, ...]:
    results = one.results
    return one.folder.parent.resolve(), results.reference, *results.memory.allowed, results.n


def _has(runs: Sequence[Run], name: str) -> bool:
    return any(name in (one.results.method, one.results.run) for one in runs)


def _choose_shown(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the metrics with a value, without details."""
    return {name: one for name, one in metrics.items() if one.value is not None and not one.detail}
