"""Verification of one recorded run."""

from collections.abc import Callable, Sequence

from kvbench.core.config import UserError
from kvbench.data.frames import TooLargeError
from kvbench.engine.ledger import BudgetExceeded
from kvbench.engine.schedule import predict_row_lengths
from kvbench.eval.files.kinds import TEXTS, find_kind
from kvbench.extras.share.verify.dataset import read_rows
from kvbench.extras.share.verify.folders import Recorded
from kvbench.extras.share.verify.record import (
    check_code,
    check_name,
    check_samples,
    check_summary,
    check_weights,
    list_differences,
    use_threads,
)
from kvbench.extras.share.verify.redraw import Rule, compare_batch, draw_again
from kvbench.extras.share.verify.scores import check_scores
from kvbench.extras.share.verify.verdict import Choice, Finding, Verdict
from kvbench.runs.generate.batch import load
from kvbench.runs.job import Job
from kvbench.runs.prepare import calibrate_job, prepare_method
from kvbench.runs.record.earlier import is_earlier
from kvbench.runs.record.folder import read_records
from kvbench.runs.record.results import Results, read_results

MakeJob = Callable[[Results], tuple[Job, Sequence[str]]]
"""Function that returns a recorded run's job, and the keys of its configuration that name files of the user."""


def verify_run(run: Recorded, make_job: MakeJob, choice: Choice) -> Verdict:
    """Return the verdict on a run; errors of the run and of this machine become findings."""
    findings: list[Finding] = []
    try:
        if is_earlier(run.folder):
            findings.append(Finding("run", "drawn by an earlier version", True))
        elif (results := read_results(run.folder)) is None:
            text = "is missing: the run is not finished, or its folder is not here"
            findings.append(Finding("results.json", text, True))
        else:
            return _verify(run, results, make_job, choice, findings)
    except BudgetExceeded as error:
        findings.append(Finding("ledger", " ".join(str(error).split())))
    except Exception as error:  # a damaged record may raise anything; the other runs are verified
        said, is_known = " ".join(str(error).split()), isinstance(error, UserError | ValueError | OSError)
        said = said if is_known else f"{type(error).__name__}: {said:.200}"
        findings.append(Finding("run", said, not isinstance(error, TooLargeError)))
    return Verdict(run.name, tuple(findings))


def _verify(
    run: Recorded, results: Results, make_job: MakeJob, choice: Choice, findings: list[Finding]
) -> Verdict:
    """Return the verdict on a finished run; `findings` receives findings as they occur, so that an error keeps them."""
    recorded, records = results.provenance or {}, read_records(run.folder)
    use_threads(recorded)
    job, user_keys = make_job(results)
    rows = None if run.dataset is None else read_rows(run.dataset, run.name, len(job.prompts))
    findings += check_samples(job, records, rows, results.n)
    load(job)
    differences, count = list_differences(job, recorded), len(job.prompts)
    obstacles = [*check_weights(job, recorded), *check_code(job, recorded, run.folder)]
    findings += obstacles
    chosen, drawn, compared, exact = choice.choose(run.name, count), 0, "", not differences
    if not obstacles:
        calibrations = calibrate_job(job)
        findings += check_name(job, calibrations, results, run.folder.name)
        budget = prepare_method(job, calibrations.artifact)
        findings += check_summary(job, records, budget, results)
        kind, size = find_kind(job.model.output), job.settings.batch_size
        # With other rounding a generated text may have another length.
        lengths = None if kind is TEXTS else predict_row_lengths(job.cache_plan.spec, job.method)
        rule = Rule(exact, from_shapes=lengths is not None)
        starts = sorted({index // size * size for index in chosen})
        chunks = [range(start, min(start + size, count)) for start in starts]
        for batch in draw_again(job, calibrations, budget, chunks):
            drawn += len(batch.records)
            findings += compare_batch(batch, run.folder, kind, records, rule)
        compared = rule.describe()
    metrics, more = check_scores(job, run.folder, results, rows or {}, user_keys, exact=exact)
    findings += more
    drawing = tuple(chosen), count, drawn, compared
    return Verdict(run.name, tuple(findings), *drawing, tuple(differences), metrics)
