"""Paired differences between two runs of the same samples.

Both runs have the same prompts and noise, so most of the variation between images cancels. The interval of a difference
is therefore narrower than the intervals of the two values.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.core.files import parse_json, read_text
from kvbench.eval.files.samples import SampleSetError, check_same_samples, read_samples
from kvbench.eval.protocol.intervals import Interval, bootstrap, change_interval, combine_strata, split_groups
from kvbench.eval.protocol.ranges import find_difference_range
from kvbench.eval.protocol.records import read_fields
from kvbench.eval.protocol.scores import (
    Metric,
    MetricSpec,
    Score,
    are_answers,
    are_shares,
    cut_interval,
    make_metric,
    mean_score,
    with_interval,
)

RECORDS = "samples.jsonl"
Rows = Mapping[int, Mapping[str, Any]]
"""Values by column for each sample index."""


@dataclass(frozen=True)
class EvaluatorResults:
    """Results of an evaluator for one run: scores of `<evaluator>-<protocol>.json` and rows of its samples."""

    evaluator: str
    protocol: str
    scores: Mapping[str, tuple[Score, MetricSpec]]
    rows: Rows


def compare_runs(ours: Path, theirs: Path) -> dict[str, Metric]:
    """Return the difference of each common metric, ours minus theirs, with its 95 % interval.

    For a metric with values per sample it is the mean difference over samples with finite values on both sides (an
    image equal to its reference has no PSNR), with a bootstrap over prompts, or `change_interval` for correct and
    wrong answers. If the metric is a mean of group means, so is its difference, and each group has an interval. For a
    metric of the whole set it is the difference of the two values, with an interval from the differences of their
    replicates, if there are any; of shares that no replicate changes, from both intervals. Intervals are cut at the
    largest possible differences.

    Args:
        ours: folder of a finished run.
        theirs: folder of another finished run.

    Raises:
        SampleSetError: the runs have different samples.
    """
    prompts = read_prompts([ours], [theirs])
    differences: dict[str, Metric] = {}
    for path in sorted((ours / "metrics").glob("*.json")):
        other = theirs / "metrics" / path.name
        if other.is_file():
            differences |= _compare_results(
                read_evaluator_results(path), read_evaluator_results(other), prompts
            )
    return differences


def read_prompts(folders: Sequence[Path], partners: Sequence[Path]) -> dict[int, str]:
    """Return the prompt of each sample by index.

    Args:
        folders: runs whose seeds may differ.
        partners: run that each of `folders` is compared with; empty without comparisons.

    Raises:
        SampleSetError: the runs have different prompts, or a run and its partner different samples.
    """
    samples = {folder: read_samples(folder / RECORDS) for folder in dict.fromkeys([*folders, *partners])}
    first = samples[folders[0]]
    for folder in folders[1:]:
        check_same_samples(f"{folders[0]} and {folder}", first, samples[folder], ["prompt"])
    for ours, theirs in dict.fromkeys(zip(folders, partners, strict=False)):
        check_same_samples(f"{ours} and {theirs}", samples[ours], samples[theirs], ["seed", "prompt"])
    return {index: sample.prompt for index, sample in first.items()}


def read_evaluator_results(path: Path) -> EvaluatorResults:
    """Read the scores of an evaluator and the rows of its samples.

    Raises:
        OSError: a file cannot be read.
        SampleSetError: a file is damaged.
    """
    samples = path.with_suffix(".samples.jsonl")
    try:
        record = parse_json(read_text(path), finite=True)
        scores = {
            name: (read_fields(Score, entry), read_fields(MetricSpec, entry))
            for name, entry in record["scores"].items()
        }
        rows = read_rows(samples) if samples.is_file() else {}
        return EvaluatorResults(str(record["evaluator"]), str(record["protocol"]), scores, rows)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SampleSetError(
            f"{path}: damaged ({type(error).__name__} {error}); score the run again"
        ) from None


def read_rows(path: Path) -> dict[int, Mapping[str, Any]]:
    """Return the lines of an evaluator's file of samples by index.

    Raises:
        OSError: the file cannot be read.
        ValueError, KeyError, TypeError: a line is damaged.
    """
    lines = (parse_json(line, finite=True) for line in read_text(path).splitlines())
    return {int(line["index"]): line for line in lines}


def _compare_results(
    ours: EvaluatorResults, theirs: EvaluatorResults, prompts: Mapping[int, str]
) -> dict[str, Metric]:
    differences = {}
    for name, (score, spec) in ours.scores.items():
        if name not in theirs.scores:
            continue
        difference = compare_samples(
            name, spec, ours.rows, theirs.rows, prompts, answers=are_answers(score.ci)
        )
        if difference is None:
            difference = compare_values(score, theirs.scores[name][0])
        if difference is not None:
            where = {"evaluator": ours.evaluator, "protocol": ours.protocol}
            cut = cut_interval(difference, find_difference_range(name))
            differences[name] = make_metric(cut, spec, **where)
    return differences


def compare_samples(
    column: str, spec: MetricSpec, ours: Rows, theirs: Rows, prompts: Mapping[int, str], *, answers: bool
) -> Score | None:
    """Return the mean difference of a metric over samples, or None if no sample has a value on both sides.

    Args:
        column: column of the metric.
        spec: the metric; its `strata` is a column too.
        ours: rows of one run.
        theirs: rows of the other run, of the same samples.
        prompts: prompt of each sample by index, by which samples are resampled.
        answers: whether samples are right or wrong answers, or changes of such answers (`are_answers`).
    """
    pairs = {i: (ours[i].get(column), theirs[i].get(column)) for i in prompts if i in ours and i in theirs}
    known = {i: (float(a), float(b)) for i, (a, b) in pairs.items() if a is not None and b is not None}
    if not known:
        return None
    values = {i: a - b for i, (a, b) in known.items()}
    whole = {-1.0, 0.0, 1.0}.issuperset(value for pair in known.values() for value in pair)
    find_interval: Callable[..., Interval | None] = change_interval if answers and whole else bootstrap
    score = mean_score(list(values.values()), [prompts[i] for i in values], find_interval)
    if spec.strata is None:
        return score
    strata = split_groups((str(ours[i][spec.strata]), value, prompts[i]) for i, value in values.items())
    means = [sum(members) / len(members) for members, _ in strata.values()]
    interval = combine_strata(means, [find_interval(*stratum) for stratum in strata.values()])
    return with_interval(Score(sum(means) / len(means), score.n), interval)


def compare_values(ours: Score, theirs: Score) -> Score | None:
    """Return the difference between two values of whole sets with its replicates, or None if a value is missing."""
    if ours.value is None or theirs.value is None:
        return None
    score = Score(ours.value - theirs.value, min(ours.n, theirs.n))
    if ours.replicates is None or theirs.replicates is None:
        return score
    replicates = ours.replicates.subtract(theirs.replicates)
    interval = None if replicates is None else replicates.surround(ours.value - theirs.value)
    if interval is not None and interval.se == 0 and are_shares(ours.ci) and are_shares(theirs.ci):
        interval = replace(_subtract_shares(ours, theirs), replicates=replicates)
    return with_interval(score, interval)


def _subtract_shares(ours: Score, theirs: Score) -> Interval:
    """Return the interval of the difference of two shares from the intervals of both.

    The squared distances to their ends are added (Newcombe, Statistics in Medicine 17, 1998, method 10). It has a width
    where no replicate differs, and is wide for paired shares.
    """
    [value, low, high], [other, below, above] = (
        np.array([side.value, *(side.ci95 or ())], np.float64).tolist() for side in (ours, theirs)
    )
    reach = math.hypot(value - low, above - other), math.hypot(high - value, other - below)
    change, se = value - other, math.hypot(ours.se or 0.0, theirs.se or 0.0)
    return Interval(change - reach[0], change + reach[1], se, "newcombe")
