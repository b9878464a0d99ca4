"""Metrics of a run, computed again from its stored samples."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvbench.core.files import parse_json, read_text, resolve_path
from kvbench.eval.files.kinds import open_samples
from kvbench.eval.protocol.base import Result, evaluate
from kvbench.eval.protocol.records import strict
from kvbench.eval.protocol.scores import Metric
from kvbench.extras.share.verify.records import CLOSE, is_close
from kvbench.extras.share.verify.verdict import Finding
from kvbench.runs.job import Job
from kvbench.runs.record.results import Results

FIELDS = ("value", "n", "ci95", "sd", "se", "bias", "better", "unit")
"""Fields of a metric that are compared."""
OTHER_ARITHMETIC = 1e-3
"""Relative difference of metrics that were computed in another arithmetic, where networks round otherwise."""


class Scores(NamedTuple):
    """Outcome of computing a run's metrics again.

    Attributes:
        findings: metrics that differ.
        computed: number of metrics that were compared.
        unchecked: reason by evaluator that cannot be repeated here.
    """

    findings: tuple[Finding, ...]
    computed: int
    unchecked: Mapping[str, str]


def check_scores(
    job: Job, folder: Path, results: Results, rows: Mapping[int, Mapping[str, Any]], *, exact: bool
) -> Scores:
    """Compute the metrics of a run again and compare them with results.json.

    Args:
        job: the run, with the evaluators that results.json names.
        folder: folder of the run, its reference beside it.
        results: contents of its results.json.
        rows: published values of each sample by index and column; empty for runs that are not published.
        exact: whether arithmetic is the same.

    Raises:
        SampleSetError: samples are missing or do not match their records.
    """
    samples = open_samples(folder).with_metadata(job.metadata)
    other = None
    if results.reference is not None:
        other = open_samples(folder.parent / results.reference).with_metadata(job.metadata)
    same_seeds = job.bounded is None or job.bounded.settings.seed == job.settings.seed
    device = job.settings.device
    scored = evaluate(list(job.evaluators.values()), samples, other, device, same_seeds=same_seeds)
    findings: list[Finding] = []
    known: dict[str, Metric] = {}
    unchecked = {}
    for name, result in zip(job.evaluators, scored, strict=True):
        known |= result.entries()
        if result.status == "ok":
            findings += _compare(result, results, CLOSE if exact else OTHER_ARITHMETIC)
            findings += _compare_rows(result, folder, rows, CLOSE if exact else OTHER_ARITHMETIC)
        elif results.evaluated[name].status == "ok" or _has_values(result, results):
            given = job.config.get("eval")
            unchecked[name] = _explain(result, given.get(name) if isinstance(given, Mapping) else None)
            findings.append(Finding(f"metric {name}", f"not computed here: {unchecked[name]}", True))
    for name in results.metrics.keys() - known.keys():
        findings.append(Finding(f"metric {name}", "no evaluator of the run computes it"))
    computed = sum(metric.status == "ok" for metric in known.values())
    return Scores(tuple(findings), computed, unchecked)


def _has_values(result: Result, results: Results) -> bool:
    """Return whether results.json has a value of a metric that an evaluator here does not give."""
    known = (results.metrics.get(name) for name in result.scores)
    return any(metric is not None and metric.value is not None for metric in known)


def _compare(result: Result, results: Results, tolerance: float) -> Iterator[Finding]:
    """Yield a finding for each field of a metric that results.json has otherwise."""
    for name, ours in result.entries().items():
        theirs = results.metrics.get(name)
        if theirs is None:
            yield Finding(f"metric {name}", "is missing in results.json")
        elif theirs.status == "ok" or theirs.value is not None:
            for field in FIELDS:
                value, known = getattr(ours, field), getattr(theirs, field)
                if not is_close(value, known, tolerance):
                    yield Finding(f"metric {name}", f"{field} is {known!r:.60}, computed again {value!r:.60}")


def _compare_rows(
    result: Result, folder: Path, rows: Mapping[int, Mapping[str, Any]], tolerance: float
) -> Iterator[Finding]:
    """Yield a finding if the stored or published values of an evaluator per sample are others."""
    if result.samples is None:
        return
    path = folder / "metrics" / f"{result.evaluator}-{result.protocol}.samples.jsonl"
    stored = {f"metrics/{path.name}": _read_rows(path), "data/samples.parquet": rows}
    for place, known in stored.items():
        names = sorted(result.metrics.keys() & result.samples.keys()) if known else ()
        for name in names:
            values = [strict({name: value})[name] for value in result.samples[name]]
            wrong = [
                i
                for i, value in zip(result.samples["index"], values, strict=True)
                if not is_close(value, known.get(i, {}).get(name), tolerance)
            ]
            if wrong:
                yield Finding(place, f"{name} of sample {wrong[0]} differs")


def _explain(result: Result, node: object) -> str:
    """Return why a metric is not computed, but no reason that may quote a file of the user.

    An outcome is shared, and a stranger's configuration chooses what is read as what.

    Args:
        result: of the evaluator.
        node: its configuration, in which files are named by absolute paths.
    """
    own = next(
        (path for path in _list_paths(node) if not path.is_relative_to(resolve_path("pkg://kvbench/"))), None
    )
    if own is None:
        return result.reason or result.status
    return f"{result.status} with {own.name}; the reason may quote this file and is not shown here"


def _list_paths(node: object) -> Iterator[Path]:
    """Yield the files and folders that a configuration names."""
    if isinstance(node, Mapping):
        for value in node.values():
            yield from _list_paths(value)
    elif isinstance(node, str) and Path(node).is_absolute() and Path(node).exists():
        yield Path(node)


def _read_rows(path: Path) -> Mapping[int, Mapping[str, Any]]:
    """Return the lines of an evaluator's file by index; without values if it is damaged, nothing if it is missing."""
    if not path.is_file():
        return {}
    try:
        rows = [parse_json(line) for line in read_text(path).splitlines()]
        return {int(row["index"]): row for row in rows}
    except (ValueError, KeyError, TypeError):
        return {-1: {}}
