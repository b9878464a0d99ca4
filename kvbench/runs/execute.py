"""Execution of one run: calibration, reference, samples, results."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import yaml

from kvbench.core.budget import Budget
from kvbench.core.config import ConfigError
from kvbench.core.files import find_obstacle
from kvbench.eval.files.kinds import find_kind, open_samples
from kvbench.runs.check import check_job
from kvbench.runs.code import describe_classes, describe_code, identify_engine, read_pins
from kvbench.runs.generate.batch import load, open_cache
from kvbench.runs.generate.blocks import generate
from kvbench.runs.generate.taken import note_prompts, take_samples
from kvbench.runs.job import Busy, Job
from kvbench.runs.job_identity import identify
from kvbench.runs.prepare import Calibrations, calibrate_job, find_used_files, prepare_method
from kvbench.runs.record.code_file import FILE as CODE_FILE
from kvbench.runs.record.code_file import describe_change, write_code
from kvbench.runs.record.earlier import SCHEMA_VERSION
from kvbench.runs.record.folder import RunFolder
from kvbench.runs.record.merge import import_run
from kvbench.runs.record.origins import describe_difference, read_digests
from kvbench.runs.record.provenance import describe_arithmetic, provenance
from kvbench.runs.record.results import FILE, Outcome, Results, read_results
from kvbench.runs.record.samples import read_finished
from kvbench.runs.run_hash import Identity
from kvbench.runs.score.finish import finish, read_inputs
from kvbench.runs.score.scoring import (
    check_evaluators,
    check_weights,
    find_pending,
)
from kvbench.runs.score.tracker import check_logger, reporting_failure

log = logging.getLogger(__name__)
Opened = Callable[[Path, int], object]
"""Callback for a run that begins: its folder, and its number of samples."""


class OpenRun(NamedTuple):
    """A run whose calibration exists, whose method is prepared and whose folder is open; `budget` is the method's."""

    job: Job
    folder: RunFolder
    calibrations: Calibrations
    budget: Budget


def run(job: Job, opened: Opened = lambda *_: None) -> Outcome:
    """Complete a run, its reference and its calibration; everything that exists is reused.

    Args:
        job: the run.
        opened: function called for the run and for its reference.

    Raises:
        ConfigError, ValueError, WeightsError, BudgetExceeded, NotFinite: see where they are defined; finished work is
            kept.
        Busy: another process calibrates, and the job does not wait.
    """
    _begin(job)
    chosen = job.reference if job.is_reference else job
    if (obstacle := find_obstacle(job.settings.runs_dir)) is not None:
        return _check_scores(job, _read_finished(chosen, obstacle))
    outcome = _complete(chosen, opened)
    if job.logger is not None and outcome.results is not None:
        with reporting_failure(outcome.folder.name):
            job.logger.send(outcome.folder, outcome.results, job.sweep)
    return _check_scores(job, outcome)


def _read_finished(job: Job, obstacle: str) -> Outcome:
    """Return the outcome of a run with nothing left to do, in a folder that an obstacle keeps from being written to.

    Raises:
        ConfigError: something is left to do.
        SampleSetError: samples are missing or do not match their records.
    """
    if all(path is None or path.is_file() for path in find_used_files(job)):
        folder = _locate(job, identify(job, calibrate_job(job)), make=False)
        known = read_finished(folder.path)
        if is_scored(job, folder, known):
            open_samples(folder.path)
            return Outcome(folder.path, known, reused=True)
    raise ConfigError(
        f"runs_dir={job.settings.runs_dir}: cannot be written ({obstacle}), and the run is not finished in it"
    )


def _complete(job: Job, opened: Opened = lambda *_: None) -> Outcome:
    """Take the missing steps of a run whose model is loaded."""
    begun = open_run(job)
    folder = begun.folder
    opened(folder.path, len(job.prompts))
    known, whole = read_results(folder.path), folder.is_whole(len(job.prompts), read=job.is_leader)
    folder.note("running")
    if whole and is_scored(job, folder, known):
        return Outcome(folder.path, known, reused=True)
    if whole and not job.is_leader:
        return Outcome(folder.path, None)
    with noting_failures(folder):
        reference = None if job.is_reference else _complete(job.reference, opened).folder
        if not whole and job.is_leader:
            check_weights(job.evaluators)  # scoring needs these hashes: fail before hours of work
        whole = whole or take_samples(job, folder, identify(job, begun.calibrations))
        whole = whole or draw_missing(begun, reference)
        if whole and (reference is None or (reference / FILE).is_file()):
            return Outcome(folder.path, finish(job, folder, reference, begun.budget))
    return Outcome(folder.path, None)


def open_run(job: Job) -> OpenRun:
    """Calibrate and prepare the method of a job whose model is loaded, and open its folder."""
    calibrations = calibrate_job(job)
    budget = prepare_method(job, calibrations.artifact)
    return OpenRun(job, open_folder(job, calibrations), calibrations, budget)


def draw_missing(run: OpenRun, reference: Path | None) -> bool:
    """Generate the samples that a run lacks; return whether all samples exist.

    `reference` is the folder of the full cache's run, None for that run itself.
    """
    job = run.job
    if job.reads and reference is not None:
        job = replace(job, full_pass=reference)
    run.folder.add_origins([provenance(job.settings.device, job.cache_plan.graph_obstacle)])
    return generate(job, run.folder, open_cache(job, run.calibrations.codebooks), run.budget)


def rescore(job: Job) -> Outcome:
    """Add metrics to a finished run; nothing is generated.

    Raises:
        ConfigError: the run or its reference is not finished.
    """
    _begin(job)
    for one in (job.reference, *(() if job.is_reference else (job,))):
        for path in find_used_files(one):
            if path is not None and not path.is_file():
                raise ConfigError(f"task=evaluate: {path} is missing; calibrate and generate with task=run")
        folder = _locate(one, identify(one, calibrate_job(one)), make=False)
        if not folder.finished():
            raise ConfigError(
                f"task=evaluate: {folder.path} is not a finished run; generate it with task=run"
            )
    return _check_scores(job, _complete(job.reference if job.is_reference else job))


def _begin(job: Job) -> None:
    """Check a job before any long work, and load its model."""
    check_evaluators(job.evaluators, job.settings.require)
    check_job(job)
    check_logger(job.logger)
    identify_engine()  # refuses a file that was edited after its import, before anything is written
    load(job)


def open_folder(job: Job, calibrations: Calibrations) -> RunFolder:
    """Open the folder that belongs to the job's identity, and describe the run in it."""
    identity = identify(job, calibrations)
    folder = _locate(job, identity, make=True)
    if not folder.finished():
        folder.remove_leftovers()
    _settle_digests(job, folder, {**calibrations.digests, "engine_sha256": identify_engine()})
    if not (folder.path / CODE_FILE).exists() and not folder.recorded():
        _record_code(job, folder, identity)
    if not (folder.path / "provenance.json").exists() and not (folder.path / "config.yaml").exists():
        folder.write("provenance.json", json.dumps(_describe_provenance(job, calibrations), indent=1))
    if not (folder.path / "config.yaml").exists():
        config = yaml.safe_dump(dict(job.config), sort_keys=False, default_flow_style=None)
        folder.write("config.yaml", config)
    return folder


def _settle_digests(job: Job, folder: RunFolder, ours: Mapping[str, object]) -> None:
    """Keep the samples of a whole run that was made by another calibration or engine, and say so; else remove them.

    Raises:
        ConfigError: another process generates the run.
    """
    if not (difference := describe_difference(read_digests(folder.path), ours)):
        return
    if folder.is_whole(len(job.prompts), read=job.is_leader):
        log.warning(f"{folder.path.name}: found, made by {difference}; delete the folder to redo it")
    elif (count := folder.start_anew(ours)) is not None:
        log.warning(f"{folder.path.name}: {count} samples made by {difference} are generated again")


def _record_code(job: Job, folder: RunFolder, identity: Identity) -> None:
    """Write the code of a new run, and log how it differs from an equal run with other code."""
    codes = {part: describe_code(classes) for part, classes in job.classes.items()}
    plain = replace(identity, code=None).hash
    if (change := describe_change(folder.path, plain, codes, read_pins().modules)) is not None:
        log.warning(change)
    write_code(folder, plain, codes)


def _locate(job: Job, identity: Identity, *, make: bool) -> RunFolder:
    """Return the folder of the job's identity; with `make`, import or make it if it does not exist."""
    kind, settings = find_kind(job.model.output), job.settings
    if make:
        note_prompts(settings.runs_dir, identity)
        import_run(job.model.name, identity, settings.runs_dir, settings.runs_dirs)
    return RunFolder(settings.runs_dir, job.model.name, identity, kind=kind, make=make)


def _describe_provenance(job: Job, calibrations: Calibrations) -> dict[str, object]:
    device, plan = job.settings.device, job.cache_plan
    return {
        "schema_version": SCHEMA_VERSION,
        **provenance(device, plan.graph_obstacle),
        "weights_sha256": job.model.weights_sha256,
        "calibration": calibrations.artifact_file and calibrations.artifact_file.name,
        **calibrations.digests,
        "engine_sha256": identify_engine(),
        "classes": {part: describe_classes(classes) for part, classes in job.classes.items()},
        "sources": {part: source.describe() for part, source in job.model.list_sources().items()},
        **({"not_followed": dict(found)} if (found := job.model.ignored_settings) else {}),
        "arithmetic": describe_arithmetic(device, job.model.spec.head_dim, plan.dtype),
    }


def is_scored(job: Job, folder: RunFolder, known: Results | None) -> bool:
    """Return whether a run's known results have all of its evaluators, as they are now."""
    evaluators, settings = job.evaluators, job.section("eval")
    return known is not None and not find_pending(evaluators, settings, read_inputs(job, folder), known)


@contextmanager
def noting_failures(folder: RunFolder) -> Iterator[None]:
    """Write an error into the run's status; suppress `Busy`, which leaves the run to other processes."""
    try:
        yield
    except Busy:
        return
    except (Exception, KeyboardInterrupt) as error:
        stopped = isinstance(error, KeyboardInterrupt)
        with suppress(OSError):  # the disk may be what failed
            folder.note("interrupted" if stopped else f"failed: {' '.join(str(error).split())}")
        raise


def _check_scores(job: Job, outcome: Outcome) -> Outcome:
    """Check that required evaluators succeeded; for a reference, only evaluators that need no reference.

    Raises:
        ConfigError: a required evaluator was skipped or failed; the message has the reasons of its metrics.
    """
    if (results := outcome.results) is None:
        return outcome
    for name in job.settings.require:
        evaluator = job.evaluators[name]
        if job.is_reference and evaluator.needs_reference:
            continue
        if (status := results.evaluated[name].status) != "ok":
            metrics = (results.metrics[one] for one in evaluator.metrics if one in results.metrics)
            reasons = {metric.reason or "no reason given" for metric in metrics}
            raise ConfigError(f"require={name}: {status} ({'; '.join(sorted(reasons))})")
    return outcome
