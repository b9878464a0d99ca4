"""Runs that differ only in seeds, joined into one run for tables and figures.

`combine_seeds` makes one `Combined`, which tables and figures take like the results of one run, of runs that differ in
nothing but the seed of their noise or calibration. Its metrics are means over its runs (`MeanMetric`), with intervals
over prompts and seeds. `compare_seeds` returns paired differences, `list_members` the runs behind a `Combined`.
"""

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from kvbench.core.files import hash_values
from kvbench.eval.files.samples import read_samples
from kvbench.eval.protocol.compare import RECORDS, compare_runs
from kvbench.eval.protocol.crossed import Crossed, cross_runs
from kvbench.eval.protocol.scores import Metric
from kvbench.report.means import SeedMeans, average_latency, combine_memory
from kvbench.runs.record.costs import average_step
from kvbench.runs.record.results import NEUTRAL, Results

SHARED_SETTINGS = (
    "method", "prompts", "shuffle", "cache_dtype", "batch_size", "batch_invariant", "noise",
)  # fmt: skip
"""Settings that joined runs share, besides model, budget, device and the calibration's settings."""
READ_ERRORS = (OSError, ValueError, KeyError, TypeError)
"""Errors raised for samples of a run that are missing, damaged or belong to other prompts."""
OTHER_SEED = re.compile(r"(full, seed )\d+")
"""Name of the method of a bound, which contains the seed of its noise."""


@dataclass(frozen=True)
class MeanMetric(Metric):
    """A metric's mean over runs, or the mean of their paired differences.

    Attributes:
        runs: number of runs.
        df: degrees of freedom of the interval; None without one.
        prompts_only: whether the interval is over prompts alone, as the one over prompts and seeds is wider than the
            metric's range.
        between: standard deviation between runs without the contribution of prompts; None if unknown.
    """

    runs: int = 1
    df: float | None = None
    prompts_only: bool = False
    between: float | None = None


@dataclass(frozen=True, kw_only=True)
class Combined(Results):
    """Runs that differ only in seeds, as one.

    Name, reference, configuration, provenance and evaluators are the first run's. `memory` is from `combine_memory`,
    `latency` from `average_latency`. `n` is the number of samples of one run. `steps` are means over the runs, up to
    the end of the shortest.

    Attributes:
        members: two or more runs by ascending seeds.
        equal: whether every run has the same samples, as with greedy decoding; metrics are then the first run's.
    """

    members: tuple[Results, ...]
    equal: bool = False


def combine_seeds(runs: Sequence[Results], runs_dir: Path) -> list[Results]:
    """Return runs with those that differ only in seeds joined, in the order of their first runs.

    Of several runs with the same seeds, the one that finished last counts. Runs are not joined if values of their
    samples are missing or damaged, or if their samples have other prompts although their settings agree. The means are
    cached in `runs_dir`, the folder of the finished `runs`.
    """
    combined: list[Results] = []
    crossings = SeedMeans(runs_dir)
    for group in group_seeds(runs):
        try:
            combined.append(group[0] if len(group) == 1 else _combine(group, runs_dir, crossings))
        except READ_ERRORS:
            combined += group
    crossings.save()
    return combined


def group_seeds(runs: Sequence[Results]) -> list[list[Results]]:
    """Return the runs that differ in nothing but seeds, by ascending seeds."""
    groups: dict[Hashable, dict[tuple[int, int], Results]] = {}
    for run in runs:
        by_seeds = groups.setdefault((find_settings(run), str(find_code(run))), {})
        if (known := by_seeds.get(find_seeds(run))) is None or known.finished <= run.finished:
            by_seeds[find_seeds(run)] = run
    return [[group[seeds] for seeds in sorted(group)] for group in groups.values()]


def list_members(run: Results) -> tuple[Results, ...]:
    """Return the runs behind a row: a combined run's, or the run itself."""
    return run.members if isinstance(run, Combined) else (run,)


def find_members(runs: Iterable[Results]) -> dict[str, Results]:
    """Return the row, combined or not, of each run by the name of the run's folder."""
    return {member.run: run for run in runs for member in list_members(run)}


def find_seeds(run: Results) -> tuple[int, int]:
    """Return the seeds of a run's noise and of its calibration; 0 for a seed that it does not have."""
    bound = OTHER_SEED.fullmatch(run.method)
    noise = run.method.removeprefix(bound[1]) if bound else run.setting("seed")
    return _read_seed(noise), _read_seed(run.setting("calibrate.seed")) if is_calibrated(run) else 0


def is_calibrated(run: Results) -> bool:
    """Return whether a run uses a calibration."""
    return (run.provenance or {}).get("calibration_sha256") is not None


def find_code(run: Results) -> list[tuple[str, str, int | str]]:
    """Return the code of a run's method and model: part, class, and its revision or, without a pin, its hash.

    Classes of `kvbench.core` are left out: the digest of the engine has them.
    """
    parts = (run.provenance or {}).get("classes")
    return [
        (part, name, record.get("revision", 0) if record.get("pinned") else str(record.get("sha256")))
        for part, classes in (parts.items() if isinstance(parts, Mapping) else ())
        for name, record in classes.items()
        if not name.startswith("kvbench.core.")
    ]


def count_seeds(run: Results) -> tuple[int, int]:
    """Return the number of a row's seeds of noise and of calibrations, 1 where they change no sample."""
    if isinstance(run, Combined) and run.equal:
        return 1, 1
    noises, calibrations = zip(*map(find_seeds, list_members(run)), strict=True)
    return len(set(noises)), len(set(calibrations))


def name_seeds(run: Results) -> tuple[str, str]:
    """Return the seeds of a row's noise and of its calibrations as strings: `0, 1`, or `-` without a calibration."""
    noises, calibrations = zip(*map(find_seeds, list_members(run)), strict=True)
    names = [", ".join(map(str, dict.fromkeys(sorted(seeds)))) for seeds in (noises, calibrations)]
    return names[0], names[1] if is_calibrated(run) else "-"


def name_count(run: Results) -> str:
    """Return the samples of a row: `64`, `64 x 2` over two seeds, `64 x 2 x 5` over five calibrations as well."""
    noises, calibrations = count_seeds(run)
    several = 3 if calibrations > 1 else 2 if noises > 1 else 1
    return " x ".join(map(str, (run.n, noises, calibrations)[:several]))


def list_counts(runs: Iterable[Results]) -> list[str]:
    """Return the different numbers of samples of rows, as `name_count` writes them."""
    return list(dict.fromkeys(map(name_count, runs)))


def list_varied(runs: Sequence[Results]) -> list[str]:
    """Return what the means of rows are over: `seeds`, `calibrations`, both, or nothing."""
    counts = zip(*map(count_seeds, runs), strict=True)
    return [kind for kind, each in zip(("seeds", "calibrations"), counts, strict=False) if max(each) > 1]


def describe_means(
    rows: Iterable[Results], shown: Iterable[Metric | None] = (), *, df: str = "df", peaks: bool = True
) -> str:
    """Return sentences on the means, counts and intervals of the combined runs of a table; empty without such runs.

    For the arguments see `kvbench.report.code_notes.list_marks`.
    """
    combined = [row for row in rows if isinstance(row, Combined)]
    equal = list(dict.fromkeys(row.method for row in combined if row.equal))
    unchanged = f"Seeds change no sample of {', '.join(equal)}: each counts once." if equal else ""
    kinds = list_varied(combined)
    if not kinds:
        return unchanged
    notes = [
        f"Means over {' and '.join(kinds)}",
        f"n: prompts x seeds{' x calibrations' * ('calibrations' in kinds)}",
        *(["peaks: the largest"] if peaks else []),
        f"{df}: degrees of freedom of an interval over {', '.join(['prompts', *kinds[:-1]])} and {kinds[-1]}",
    ]
    if any(isinstance(metric, MeanMetric) and metric.prompts_only for metric in shown):
        notes.append("†: over prompts alone, as the other interval is wider than the metric's range")
    return f"{'; '.join(notes)}. {unchanged}".rstrip()


def compare_seeds(first: Results, second: Results, runs_dir: Path) -> dict[str, Metric]:
    """Return the difference of each common metric, first minus second, paired by prompt and seed.

    A run is paired with the other side's run of the same seed and, if both sides have calibrations, of the same
    calibration; a single calibration of the other side is paired with every run. With one pair the interval is over
    prompts. Without a common seed there are no differences.

    Raises:
        SampleSetError: the runs of a pair have different samples.
    """
    pairs = _pair_members(list_members(first), list_members(second))
    if not pairs:
        return {}
    if all(isinstance(side, Combined) and side.equal for side in (first, second)):
        pairs = pairs[:1]
    sides = [[_find_folder(run, runs_dir) for run in side] for side in zip(*pairs, strict=True)]
    if len(pairs) == 1:
        return compare_runs(sides[0][0], sides[1][0])
    choices = [(find_seeds(run)[0], *(find_seeds(one)[1] for one in (run, other))) for run, other in pairs]
    crossed = cross_runs(sides[0], sides[1], choices)
    return {name: _make_metric(one.mean, one, len(pairs)) for name, one in crossed.items()}


def _pair_members(first: Sequence[Results], second: Sequence[Results]) -> list[tuple[Results, Results]]:
    """Return the pairs of runs with the same noise and, where both have it, the same calibration."""
    pairs = []
    for run in first:
        noise, calibration = find_seeds(run)
        others = [other for other in second if find_seeds(other)[0] == noise]
        same = [other for other in others if find_seeds(other)[1] == calibration]
        pairs += [(run, other) for other in same or others]
    return pairs


def find_settings(run: Results) -> Hashable:
    """Return what joined runs share besides code: all recorded settings except seeds and sources of known weights."""
    known, calibrate, model = run.provenance or {}, run.setting("calibrate"), run.setting("model")
    settings: list[object] = [*(run.setting(name) for name in SHARED_SETTINGS), run.storage]
    if isinstance(calibrate, Mapping) and is_calibrated(run):
        settings.append({**calibrate, "seed": None, "orders": None})
    settings.append(known.get("engine_sha256"))
    weights = known.get("weights_sha256")
    if isinstance(model, Mapping):
        left_out = NEUTRAL if weights is None else ("sources", *NEUTRAL)
        settings.append({name: value for name, value in model.items() if name not in left_out})
    device = str(run.setting("device")).partition(":")[0]
    method = OTHER_SEED.sub(r"\1", run.method)
    identity = run.model, method, run.reference is None, run.n, *run.memory.allowed, device, weights
    return *identity, hash_values(settings)


def _read_seed(value: object) -> int:
    return int(value) if isinstance(value, int | str) else 0


def _find_folder(run: Results, runs_dir: Path) -> Path:
    return runs_dir / run.model / run.run


def _combine(runs: Sequence[Results], runs_dir: Path, crossings: SeedMeans) -> Combined:
    first, equal = runs[0], _have_equal_samples(runs, runs_dir)
    averages = {
        "method": OTHER_SEED.sub(r"\1+1", first.method),
        "memory": combine_memory([run.memory for run in runs]),
        "latency": average_latency([run.latency for run in runs]),
        "metrics": first.metrics if equal else _average_metrics(runs, runs_dir, crossings),
        "steps": tuple(map(average_step, zip(*(run.steps for run in runs), strict=False))),
        "finished": max(run.finished for run in runs),
    }
    return Combined(**{**vars(first), **averages}, members=tuple(runs), equal=equal)


def _have_equal_samples(runs: Sequence[Results], runs_dir: Path) -> bool:
    values = [{name: one.value for name, one in run.metrics.items()} for run in runs]
    if any(own != values[0] for own in values):  # most runs, whose records need not be read
        return False
    first, *others = (read_samples(_find_folder(run, runs_dir) / RECORDS) for run in runs)
    hashes = {index: sample.sha256 for index, sample in first.items()}
    return all({index: sample.sha256 for index, sample in own.items()} == hashes for own in others)


def _average_metrics(runs: Sequence[Results], runs_dir: Path, crossings: SeedMeans) -> dict[str, Metric]:
    """Return the metrics of all runs; one that lacks a value in some run has none, with that run's reason."""
    crossed = crossings.cross([_find_folder(run, runs_dir) for run in runs], [*map(find_seeds, runs)])
    metrics: dict[str, Metric] = {}
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        measured = [run.metrics[name] for run in runs if name in run.metrics]
        lacking = next((metric for metric in measured if metric.value is None), None)
        if len(measured) < len(runs):
            reason = f"measured at {len(measured)} of {len(runs)} seeds"
            metrics[name] = replace(measured[0], value=None, ci95=None, status="skipped", reason=reason)
        elif lacking is not None:
            metrics[name] = lacking
        elif name in crossed:
            metrics[name] = _make_metric(measured[0], crossed[name], len(runs))
        else:
            values = [metric.value for metric in measured if metric.value is not None]
            metrics[name] = replace(
                measured[0], value=fmean(values), sd=None, se=None, ci95=None, ci=None, bias=None
            )
    return metrics


def _make_metric(like: Metric, crossed: Crossed, runs: int) -> MeanMetric:
    """Return a metric with the values of `crossed`, and the status and needs of `like`."""
    mean = crossed.mean
    score = {name: getattr(mean, name) for name in ("value", "n", "sd", "se", "ci95", "ci", "bias")}
    more = {"runs": runs, "df": crossed.df, "prompts_only": crossed.prompts_only, "between": crossed.between}
    return MeanMetric(**{**vars(like), **score, **more})
