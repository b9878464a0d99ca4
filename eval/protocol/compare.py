"""Paired differences between two runs of the same samples.

Both runs share prompts and noise, so most of the spread between images cancels; the interval of a difference is then
far narrower than the intervals of the two values.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.eval.files.samples import SampleSetError, read_samples
from kvbench.eval.protocol.intervals import Interval, bootstrap, combine_strata
from kvbench.eval.protocol.records import read_fields
from kvbench.eval.protocol.scores import (
    Metric,
    MetricSpec,
    Score,
    make_metric,
    mean_score,
    with_interval,
)
from kvbench.eval.protocol.shares import change_interval

Rows = Mapping[int, Mapping[str, Any]]
"""Values of each sample by column, by index of the sample."""


@dataclass(frozen=True)
class Record:
    """Files of an evaluator for one run: the scores of `<evaluator>-<protocol>.json` and the rows beside it."""

    evaluator: str
    protocol: str
    scores: Mapping[str, tuple[Score, MetricSpec]]
    rows: Rows


def compare_runs(ours: Path, theirs: Path) -> dict[str, Metric]:
    """Return the difference, ours minus theirs, of every metric that both runs have, with its 95 % interval.

    A metric with a value per sample is the mean difference over the samples that have a finite value on both sides (an
    image equal to its reference has no PSNR), bootstrapped over prompts, for right and wrong answers with
    `change_interval`. Where the metric is a mean of groups' means, so is its difference, and each group has its
    interval. A metric of the whole set is the difference of the two values; its interval comes from the differences
    between the replicates of both, and is missing where an evaluator left none.

    Args:
        ours: a finished run's folder.
        theirs: another one's.

    Raises:
        SampleSetError: the runs do not hold the same samples.
    """
    prompts = shared_prompts(ours, theirs)
    found: dict[str, Metric] = {}
    for path in sorted((ours / "metrics").glob("*.json")):
        other = theirs / "metrics" / path.name
        if other.is_file():
            found |= _compare_records(read_record(path), read_record(other), prompts)
    return found


def shared_prompts(ours: Path, theirs: Path) -> dict[int, str]:
    """Return the prompt of each sample, by index.

    Raises:
        SampleSetError: the runs do not hold the same samples.
    """
    first, second = read_samples(ours / "samples.jsonl"), read_samples(theirs / "samples.jsonl")
    for index in sorted(first.keys() | second.keys()):
        sides = [(one.seed, one.prompt) if (one := side.get(index)) else None for side in (first, second)]
        if sides[0] != sides[1]:
            raise SampleSetError(
                f"{ours} and {theirs} cannot be compared: sample {index} is {sides[0]} and {sides[1]}"
            )
    return {index: sample.prompt for index, sample in first.items()}


def read_record(path: Path) -> Record:
    """Read an evaluator's scores and the rows beside them."""
    record = json.loads(path.read_text(encoding="utf-8"))
    scores = {
        name: (read_fields(Score, entry), read_fields(MetricSpec, entry))
        for name, entry in record["scores"].items()
    }
    samples = path.with_suffix(".samples.jsonl")
    lines: Sequence[str] = samples.read_text(encoding="utf-8").splitlines() if samples.is_file() else ()
    rows = {int(row["index"]): row for row in map(json.loads, lines)}
    return Record(record["evaluator"], record["protocol"], scores, rows)


def _compare_records(ours: Record, theirs: Record, prompts: Mapping[int, str]) -> dict[str, Metric]:
    found = {}
    for name, (score, spec) in ours.scores.items():
        if name not in theirs.scores:
            continue
        difference = _compare_samples(name, spec, ours.rows, theirs.rows, prompts)
        if difference is None:
            difference = compare_values(score, theirs.scores[name][0])
        if difference is not None:
            where = {"evaluator": ours.evaluator, "protocol": ours.protocol}
            found[name] = make_metric(difference, spec, **where)
    return found


def _compare_samples(
    column: str, spec: MetricSpec, ours: Rows, theirs: Rows, prompts: Mapping[int, str]
) -> Score | None:
    """Return the mean difference between two columns; None if no sample has a number in both."""
    pairs = {i: (ours[i].get(column), theirs[i].get(column)) for i in prompts if i in ours and i in theirs}
    known = {i: (float(a), float(b)) for i, (a, b) in pairs.items() if a is not None and b is not None}
    if not known:
        return None
    values = {i: a - b for i, (a, b) in known.items()}
    answers = {0.0, 1.0}.issuperset(one for pair in known.values() for one in pair)
    find_interval: Callable[..., Interval | None] = change_interval if answers else bootstrap
    score = mean_score(list(values.values()), [prompts[i] for i in values], find_interval)
    if spec.strata is None:
        return score
    strata: dict[str, tuple[list[float], list[str]]] = {}
    for i, value in values.items():
        members, clusters = strata.setdefault(str(ours[i][spec.strata]), ([], []))
        members.append(value)
        clusters.append(prompts[i])
    means = [sum(members) / len(members) for members, _ in strata.values()]
    interval = combine_strata(means, [find_interval(*stratum) for stratum in strata.values()])
    return with_interval(Score(sum(means) / len(means), score.n), interval)


def compare_values(ours: Score, theirs: Score) -> Score | None:
    """Return the difference between two values of whole sets, with its replicates; None if a side has no value."""
    if ours.value is None or theirs.value is None:
        return None
    score = Score(ours.value - theirs.value, min(ours.n, theirs.n))
    if ours.replicates is None or theirs.replicates is None:
        return score
    replicates = ours.replicates.subtract(theirs.replicates)
    return (
        score if replicates is None else with_interval(score, replicates.surround(ours.value - theirs.value))
    )
