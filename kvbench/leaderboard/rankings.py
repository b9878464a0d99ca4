"""Rankings of published runs: one for each metric and group of runs with equal reference, prompts, seed and budget."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvbench.core.storage import CODE_DTYPES
from kvbench.eval.protocol.compare import compare_samples
from kvbench.eval.protocol.ranges import find_difference_range
from kvbench.eval.protocol.scores import Metric, MetricSpec, Score, cut_interval
from kvbench.leaderboard.datasets import Dataset, Entry
from kvbench.leaderboard.settings import Fields, explain_difference, list_details, list_fields
from kvbench.leaderboard.verifications import Checked, Verification, choose_checked
from kvbench.report.runs_table import list_metrics, name_methods
from kvbench.verify.verdict import Status

FULL = "full"
TOLERANCE = 1e-6
"""Largest deviation of a recorded mean from the mean of its values per sample, relative or absolute."""
BASELINE = "random"


class Copy(NamedTuple):
    """A run in one dataset, with the outcome of its verification that counts; None without one."""

    dataset: Dataset
    entry: Entry
    checked: tuple[Verification, Checked] | None


@dataclass(frozen=True)
class Row:
    """A run in a ranking.

    Attributes:
        rank: one more than the number of rows with a better value.
        label: the method, with the settings in which rows of the ranking differ.
        metric: its value and interval.
        copies: the same run in one or more datasets.
        place: its place among the rows of its method, from 1.
        rows: number of rows of its method.
        difference: paired difference to the first row; None for the first row, or if values per sample are missing.
    """

    rank: int
    label: str
    metric: Metric
    copies: tuple[Copy, ...]
    place: int
    rows: int
    difference: Score | None


@dataclass(frozen=True)
class Ranking:
    """Runs that can be compared by one metric, best first.

    Attributes:
        fields: what they share, see `list_fields`.
        rows: the runs.
        nearest: number of the ranking of this metric and model that is most alike, from 1; None without another one.
        reasons: what differs from that one.
    """

    fields: Fields
    rows: tuple[Row, ...]
    nearest: int | None = None
    reasons: tuple[str, ...] = ()

    @property
    def has_baseline(self) -> bool:
        """Whether the random baseline is in it."""
        return any(row.copies[0].entry.results.method == BASELINE for row in self.rows)


def rank_runs(datasets: Sequence[tuple[Dataset, Sequence[Verification]]]) -> dict[str, list[Ranking]]:
    """Return the rankings by metric, those with most rows first; the order of datasets does not matter.

    The full cache in 16 or 32 bits is not ranked. Runs share a ranking only if their references have the same samples,
    or if each reference was verified and none of its copies differs, so that their samples differ by rounding at most.

    Args:
        datasets: each with the outcomes of its verification.
    """
    ordered = sorted(datasets, key=lambda pair: (pair[0].folder.as_posix(), pair[0].files_sha256))
    copies = [
        Copy(dataset, entry, choose_checked(known, path))
        for dataset, known in ordered
        for path, entry in dataset.entries.items()
    ]
    verified = _list_samples(copies, "verified") - _list_samples(copies, "differs")
    ranked = [copy for copy in copies if _is_ranked(copy)]
    names = list_metrics([copy.entry.results for copy in ranked])
    return {name: rankings for name in names if (rankings := _rank_metric(name, ranked, verified))}


def _list_samples(copies: Iterable[Copy], status: Status) -> set[tuple[str, str]]:
    """Return the paths and samples of the runs with a verdict in some dataset."""
    return {
        (copy.entry.path, copy.entry.samples)
        for copy in copies
        if copy.checked is not None and copy.checked[1].status == status
    }


def _is_ranked(copy: Copy) -> bool:
    """Return whether a run compresses: by a method, or by storage of the full cache in few bits; bounds do not."""
    run = copy.entry.results
    compresses = run.method.partition(",")[0] != FULL or (run.method == FULL and run.stored in CODE_DTYPES)
    return run.reference is not None and compresses


def _rank_metric(name: str, copies: Iterable[Copy], verified: set[tuple[str, str]]) -> list[Ranking]:
    groups: dict[tuple[tuple[str, str], ...], list[Copy]] = {}
    for copy in copies:
        metric, reference = copy.entry.results.metrics.get(name), copy.dataset.find_reference(copy.entry)
        if metric is None or metric.value is None or reference is None:
            continue
        is_verified = (reference.path, reference.samples) in verified
        fields = list_fields(copy.entry, name, metric, "verified" if is_verified else reference.samples)
        groups.setdefault(tuple(fields.items()), []).append(copy)
    rankings = [(Ranking(dict(key), _rank_copies(name, group)), group[0]) for key, group in groups.items()]
    rankings.sort(key=lambda pair: (-len(pair[0].rows), sorted(pair[0].fields.items())))
    return _explain_rankings(rankings)


def _rank_copies(name: str, copies: Sequence[Copy]) -> tuple[Row, ...]:
    """Return the rows of one ranking; copies of one run with the same samples and value are one row."""
    same: dict[tuple[object, ...], list[Copy]] = {}
    for copy in copies:
        metric = copy.entry.results.metrics[name]
        same.setdefault((copy.entry.path, copy.entry.samples, f"{metric.value:.9g}", metric.ci95), []).append(
            copy
        )
    groups = list(same.values())
    results = [group[0].entry.results for group in groups]
    labels = [_mark_code(label, group[0]) for label, group in zip(name_methods(results), groups, strict=True)]
    sign = -1 if results[0].metrics[name].better == "higher" else 1

    def place(pair: tuple[str, list[Copy]]) -> tuple[object, ...]:
        entry = pair[1][0].entry
        return sign * _read_value(entry, name), pair[0], entry.path, entry.samples

    ordered = sorted(zip(labels, groups, strict=True), key=place)
    values = [_read_value(group[0].entry, name) for _, group in ordered]
    counts = Counter(group[0].entry.results.method for group in groups)
    seen: Counter[str] = Counter()
    rows: list[Row] = []
    for (label, group), value in zip(ordered, values, strict=True):
        entry = group[0].entry
        seen[entry.results.method] += 1
        rows.append(
            Row(
                rank=1 + sum(sign * other < sign * value for other in values),
                label=label,
                metric=entry.results.metrics[name],
                copies=tuple(group),
                place=seen[entry.results.method],
                rows=counts[entry.results.method],
                difference=subtract(entry, ordered[0][1][0].entry, name) if rows else None,
            )
        )
    return tuple(rows)


def _read_value(entry: Entry, name: str) -> float:
    value = entry.results.metrics[name].value
    assert value is not None  # rows without a value are in no ranking
    return value


def _mark_code(label: str, copy: Copy) -> str:
    """Return a row's label with the class of a method that is not kvbench's."""
    target = str(copy.entry.results.setting("method._target_") or "kvbench.")
    return label if target.startswith("kvbench.") else f"{label} ({target})"


def subtract(ours: Entry, theirs: Entry, name: str) -> Score | None:
    """Return the paired difference of a metric, ours minus theirs, with an interval over prompts.

    None if values per sample are missing, or if the metric is not their mean.
    """
    if not all(_is_mean(one, name) for one in (ours, theirs)):
        return None
    metric = ours.results.metrics[name]
    prompts = {index: str(row.get("prompt")) for index, row in ours.rows.items()}
    spec = MetricSpec(metric.better, metric.unit, metric.digits)
    score = compare_samples(name, spec, ours.rows, theirs.rows, prompts)
    return None if score is None else cut_interval(score, find_difference_range(name))


def _is_mean(entry: Entry, name: str) -> bool:
    """Return whether a metric is the mean of its values per sample."""
    values = [row.get(name) for row in entry.rows.values()]
    known = [float(value) for value in values if isinstance(value, int | float)]
    if not known:
        return False
    value, mean = _read_value(entry, name), sum(known) / len(known)
    return abs(mean - value) <= TOLERANCE * max(1.0, abs(value))


def _explain_rankings(rankings: Sequence[tuple[Ranking, Copy]]) -> list[Ranking]:
    """Return rankings with what keeps each apart from the one before it, of the same model, that is most alike."""
    explained: list[Ranking] = []
    details = [list_details(copy.entry.results) for _, copy in rankings]
    for place, (ranking, _) in enumerate(rankings):
        reasons = {
            other: explain_difference(
                ranking.fields, rankings[other][0].fields, details[place], details[other]
            )
            for other in range(place)
            if rankings[other][0].fields["model"] == ranking.fields["model"]
        }
        nearest = min(reasons, key=lambda other: (len(reasons[other]), other), default=None)
        explained.append(
            ranking
            if nearest is None
            else Ranking(ranking.fields, ranking.rows, nearest + 1, tuple(reasons[nearest]))
        )
    return explained
