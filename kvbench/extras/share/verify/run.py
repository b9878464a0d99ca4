"""Verification of one recorded run."""

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import NamedTuple, Protocol

from kvbench.core.config import UserError
from kvbench.engine.ledger import BudgetExceeded
from kvbench.eval.files.kinds import IMAGES, find_stored_kind
from kvbench.eval.files.samples import SampleSetError
from kvbench.extras.share.verify.arithmetic import list_differences, use_threads
from kvbench.extras.share.verify.dataset import read_rows
from kvbench.extras.share.verify.folders import Recorded
from kvbench.extras.share.verify.identity import (
    check_calibration,
    check_code,
    check_copies,
    check_name,
    check_reference,
    check_weights,
    read_recordings,
)
from kvbench.extras.share.verify.records import check_prompts, check_samples, check_summary
from kvbench.extras.share.verify.redraw import Rule, compare_batch, draw_again, find_batch
from kvbench.extras.share.verify.scores import check_scores
from kvbench.extras.share.verify.verdict import Finding, Verdict
from kvbench.runs.generate.batch import load
from kvbench.runs.job import Job
from kvbench.runs.prepare import Calibrations, calibrate_job, prepare_method
from kvbench.runs.record.earlier import is_earlier
from kvbench.runs.record.folder import read_records
from kvbench.runs.record.results import Results, read_results


class Choice(NamedTuple):
    """Choice of samples by the verifier.

    Attributes:
        samples: number of samples of each run.
        seed: seed of their choice.
    """

    samples: int
    seed: int

    def choose(self, name: str, count: int) -> list[int]:
        """Return the indices of a run's chosen samples in order, all if it has no more."""
        chosen = Random(f"{self.seed} {name}").sample(range(count), min(self.samples, count))
        return sorted(chosen)


class MakeJob(Protocol):
    """Maker of a recorded run's job."""

    def __call__(self, results: Results, config: Mapping[str, object]) -> Job:
        """Return the checked job of a configuration, with the evaluators that the results name.

        Raises:
            ValueError: the job does not fit, or names code or files that may not be used or do not exist here.
        """
        ...


def verify_run(one: Recorded, make_job: MakeJob, choice: Choice) -> Verdict:
    """Return the verdict on a run; errors of the run and of this machine become findings."""
    findings: list[Finding] = []
    if is_earlier(one.folder):
        return Verdict(one.name, (Finding("run", "drawn by an earlier version", True),))
    try:
        results = read_results(one.folder)
        if results is None:
            text = "is missing: the run is not finished, or its folder is not here"
            return Verdict(one.name, (Finding("results.json", text, True),))
        return _verify(one, results, make_job, choice, findings)
    except BudgetExceeded as error:
        findings.append(Finding("ledger", " ".join(str(error).split())))
    except (UserError, ValueError, OSError) as error:
        findings.append(Finding("run", " ".join(str(error).split()), True))
    except Exception as error:  # a damaged record may raise anything; the other runs are verified
        said = " ".join(str(error).split())
        findings.append(Finding("run", f"{type(error).__name__}: {said:.200}", True))
    return Verdict(one.name, tuple(findings))


def _verify(
    one: Recorded, results: Results, make_job: MakeJob, choice: Choice, findings: list[Finding]
) -> Verdict:
    """Return the verdict on a finished run; what is found before an error is in `findings`."""
    folder, recorded, records = one.folder, read_recordings(one.folder), read_records(one.folder)
    use_threads(recorded.provenance)
    kind = find_stored_kind(folder) or IMAGES
    findings += check_copies(results, recorded, folder.name)
    findings += check_samples(folder, kind, records, results.n)
    job = make_job(results, results.config)
    findings += check_prompts(job, records, results.n)
    load(job)
    weights, code = list(check_weights(job, recorded.provenance)), list(check_code(job, recorded, folder))
    findings += [*weights, *code]
    differences = list_differences(job, recorded.provenance)
    if weights or code:
        if not code:
            findings += check_name(job, Calibrations(), recorded, folder.name)
            findings += check_reference(job, recorded.provenance, results.reference)
        return _add_scores(Verdict(one.name), job, one, results, findings, exact=not differences)
    calibrations = calibrate_job(job)
    findings += check_name(job, calibrations, recorded, folder.name)
    findings += check_reference(job, recorded.provenance, results.reference)
    findings += check_calibration(calibrations, recorded.provenance, same_arithmetic=not differences)
    chosen, rule = choice.choose(one.name, len(job.prompts)), Rule(not differences)
    budget = prepare_method(job, calibrations.artifact)
    findings += check_summary(job, records, budget, results)
    size, count = job.settings.batch_size, len(job.prompts)
    found = {index: find_batch(records, index, size, count) for index in chosen if index in records}
    for index in (index for index, block in found.items() if block is None):
        text = "was drawn in a smaller batch than the configuration's; which is not recorded"
        findings.append(Finding(f"sample {index}", text, True))
    chunks = sorted({block for block in found.values() if block is not None}, key=lambda block: block.start)
    drawn = 0
    for batch in draw_again(job, calibrations, budget, chunks) if chunks else ():
        drawn += len(batch.records)
        findings += compare_batch(batch, folder, kind, records, rule)
    verdict = Verdict(
        one.name, (), tuple(chosen), count, drawn, rule.describe(), other_arithmetic=tuple(differences)
    )
    return _add_scores(verdict, job, one, results, findings, exact=not differences)


def _add_scores(
    verdict: Verdict, job: Job, one: Recorded, results: Results, findings: list[Finding], *, exact: bool
) -> Verdict:
    """Return the verdict with the findings, including findings of metrics."""
    try:
        rows = {} if one.dataset is None else read_rows(one.dataset, one.name, len(job.prompts))
        scores = check_scores(job, one.folder, results, rows, exact=exact)
    except SampleSetError as error:
        found = (*findings, Finding("metrics", f"cannot be computed again: {error}", True))
        return replace(verdict, findings=found)
    found = (*findings, *scores.findings)
    return replace(verdict, findings=found, metrics=scores.computed, unchecked=scores.unchecked)
