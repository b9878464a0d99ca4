"""Metrics of a run, computed again from its stored samples."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.eval.files.kinds import open_samples
from kvbench.eval.files.samples import SampleSetError
from kvbench.eval.protocol.base import Result, evaluate
from kvbench.eval.protocol.compare import read_rows
from kvbench.eval.protocol.records import strict
from kvbench.extras.share.verify.record import TOLERANCE, is_close
from kvbench.extras.share.verify.verdict import Finding
from kvbench.runs.job import Job
from kvbench.runs.record.results import Results

FIELDS = ("value", "n", "ci95", "sd", "se", "bias", "better", "unit")
"""Fields of a metric that are compared."""
OTHER_ARITHMETIC = 1e-3
"""Maximum relative difference of metrics whose networks ran in different arithmetic and round differently."""

Rows = Mapping[int, Mapping[str, Any]]
"""Values of each sample by index and column."""


def check_scores(
    job: Job, folder: Path, results: Results, rows: Rows, user_keys: Sequence[str], *, exact: bool
) -> tuple[int, list[Finding]]:
    """Compute the metrics of a run again and compare them with results.json.

    Args:
        job: the run, with the evaluators that results.json names.
        folder: folder of the run, its reference beside it.
        results: contents of its results.json.
        rows: published values of each sample; empty for runs that are not published.
        user_keys: keys of the configuration that name files of the user, which no finding may quote.
        exact: whether the recorded arithmetic equals the arithmetic of this machine.

    Returns:
        The number of metrics that were computed again, and the findings.
    """
    name = results.reference
    if name is not None and not (folder.parent / name).is_dir():
        text = f"{name:.80} is not beside the run, so no metric is compared; copy it there"
        return 0, [Finding("reference", text, True)]
    try:
        samples = open_samples(folder).with_metadata(job.metadata)
        other = None if name is None else open_samples(folder.parent / name).with_metadata(job.metadata)
    except SampleSetError as error:
        return 0, [Finding("samples", str(error).replace(f"{folder.parent}/", ""))]
    same_seeds = job.bounded is None or job.bounded.settings.seed == job.settings.seed
    evaluators, device = list(job.evaluators.values()), job.settings.device
    scored = evaluate(evaluators, samples, other, device, same_seeds=same_seeds)
    findings: list[Finding] = []
    known: set[str] = set()
    computed = 0
    for key, result in zip(job.evaluators, scored, strict=True):
        known |= result.entries().keys()
        if result.status == "ok":
            tolerance = TOLERANCE if exact else OTHER_ARITHMETIC
            findings += [
                *_compare(result, results, tolerance),
                *_compare_rows(result, folder, rows, tolerance),
            ]
            computed += sum(metric.status == "ok" for metric in result.entries().values())
        elif results.evaluated[key].status == "ok" or any(
            results.metrics[name].value is not None for name in result.scores if name in results.metrics
        ):
            hidden = any(name.startswith(f"eval.{key}.") for name in user_keys)
            # An outcome is shared, and a stranger's configuration chooses which file is read in which format.
            reason = "with a file of weights=FOLDER, which is not quoted" if hidden else result.reason
            findings.append(
                Finding(f"metric {key}", f"not computed here: {result.status} {reason or ''}", True)
            )
    more = sorted(results.metrics.keys() - known)
    findings += [Finding(f"metric {metric}", "no evaluator of the run computes it") for metric in more]
    return computed, findings


def _compare(result: Result, results: Results, tolerance: float) -> Iterator[Finding]:
    """Yield a finding for each field of a metric that differs from results.json."""
    for name, ours in result.entries().items():
        theirs = results.metrics.get(name)
        if theirs is None:
            yield Finding(f"metric {name}", "is missing in results.json")
        elif theirs.status == "ok" or theirs.value is not None:
            for field in FIELDS:
                value, known = getattr(ours, field), getattr(theirs, field)
                if not is_close(value, known, tolerance):
                    yield Finding(f"metric {name}", f"{field} is {known!r:.60}, computed again {value!r:.60}")


def _compare_rows(result: Result, folder: Path, rows: Rows, tolerance: float) -> Iterator[Finding]:
    """Yield a finding for each metric whose stored or published values per sample differ from `result`."""
    if result.samples is None:
        return
    path = folder / "metrics" / f"{result.evaluator}-{result.protocol}.samples.jsonl"
    try:
        stored: Rows = read_rows(path) if path.is_file() else {}
    except (ValueError, KeyError, TypeError):
        stored = {-1: {}}  # damaged: no sample has its value
    for source, known in ((f"metrics/{path.name}", stored), ("data/samples.parquet", rows)):
        for name in sorted(result.metrics.keys() & result.samples.keys()) if known else ():
            values = [strict({name: value})[name] for value in result.samples[name]]
            pairs = zip(result.samples["index"], values, strict=True)
            wrong = [i for i, value in pairs if not is_close(value, known.get(i, {}).get(name), tolerance)]
            if wrong:
                yield Finding(source, f"{name} of sample {wrong[0]} differs")
