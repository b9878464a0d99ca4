"""Execution of one run: calibration, reference, samples, results."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import yaml

from kvbench.core.config import ConfigError
from kvbench.core.files import remove_unfinished
from kvbench.runs.generate.batch import load, open_cache
from kvbench.runs.generate.blocks import generate
from kvbench.runs.job import Busy, Job
from kvbench.runs.job_identity import identify
from kvbench.runs.prepare import books_used, file_used, prepare_method, read_books
from kvbench.runs.record.folder import RunFolder
from kvbench.runs.record.kinds import find_sample_kind
from kvbench.runs.record.merge import import_run
from kvbench.runs.record.provenance import describe_arithmetic, provenance
from kvbench.runs.record.results import FILE, Outcome, read_results
from kvbench.runs.score.finish import finish
from kvbench.runs.score.scoring import check_required, check_scored, find_pending

Opened = Callable[[Path, int], object]
"""Callback for a run that begins: its folder, and its number of samples."""


def run(job: Job, opened: Opened | None = None) -> Outcome:
    """Complete a run, its reference and its calibration; what exists is reused.

    Args:
        job: the run.
        opened: called for the run and for its reference.

    Raises:
        ConfigError, ValueError, WeightsError, BudgetExceeded, NotFinite: see where they are defined; nothing that was
            finished is lost.
        Busy: another process calibrates, and the job does not wait.
    """
    _load(job)
    outcome = _complete(job.as_reference() if job.reference else job, opened)
    if job.logger is not None and outcome.results is not None:
        job.logger.send(outcome.folder, outcome.results, job.sweep)
    return _checked(job, outcome)


def rescore(job: Job) -> Outcome:
    """Add metrics to a finished run; nothing is generated.

    Raises:
        ConfigError: the run or its reference is not finished.
    """
    _load(job)
    for needed in (job.as_reference(), *(() if job.reference else (job,))):
        for used in (file_used(needed), books_used(needed)):
            if used is not None and not used.is_file():
                raise ConfigError(f"task=evaluate: {used} is missing; calibrate and generate with task=run")
        folder = _locate(needed, make=False)[0]
        if not folder.finished():
            raise ConfigError(
                f"task=evaluate: {folder.path} is not a finished run; generate it with task=run"
            )
    return _checked(job, _complete(job.as_reference() if job.reference else job))


def _checked(job: Job, outcome: Outcome) -> Outcome:
    if outcome.results is not None:
        # The reference has nothing to be compared with.
        named = [n for n in job.settings.require if not (job.reference and job.evaluators[n].needs_reference)]
        check_scored(job.evaluators, named, outcome.results)
    return outcome


def _load(job: Job) -> None:
    check_required(job.evaluators, job.settings.require)
    job.check()
    load(job)


def _complete(job: Job, opened: Opened | None = None) -> Outcome:
    folder = open_run(job)
    if opened is not None:
        opened(folder.path, len(job.prompts))
    known = read_results(folder.path)
    whole = folder.is_whole(len(job.prompts), read=job.leads)
    todo = find_pending(job.evaluators, job.section("eval"), known)
    folder.note("running")
    if known is not None and whole and not todo:
        return Outcome(folder.path, known, reused=True)
    if whole and not job.leads:
        return Outcome(folder.path, None)
    try:
        reference = None if job.reference else _complete(job.as_reference(), opened).folder
        whole = whole or generate(job, folder, open_cache(job, read_books(job)))
        if not whole or (reference is not None and not (reference / FILE).is_file()):
            return Outcome(folder.path, None)
        return Outcome(folder.path, finish(job, folder, reference))
    except Busy:  # others score it
        return Outcome(folder.path, None)
    except (Exception, KeyboardInterrupt) as error:
        stopped = isinstance(error, KeyboardInterrupt)
        with suppress(OSError):  # the disk may be what failed
            folder.note("interrupted" if stopped else f"failed: {' '.join(str(error).split())}")
        raise


def open_run(job: Job) -> RunFolder:
    """Prepare the method and open the folder that belongs to the job's identity.

    What describes the run is written unless it is there; a damaged configuration is written again, since any job of
    this identity describes the run.
    """
    folder, used = _locate(job, make=True)
    if not folder.finished():
        remove_unfinished(folder.path)
    if not (folder.path / "provenance.json").exists() and not (folder.path / "config.yaml").exists():
        hashes = {"weights_sha256": job.model.weights_sha256, "calibration_sha256": used}
        sources = {part: source.describe() for part, source in job.model.list_sources().items()}
        found = provenance(job.settings.device, job.graph_obstacle) | hashes | {"sources": sources}
        arithmetic = describe_arithmetic(job.settings.device, job.model.spec.head_dim, job.dtype)
        folder.write("provenance.json", json.dumps(found | {"arithmetic": arithmetic}, indent=1))
    if not _is_whole(folder.path / "config.yaml"):
        folder.write(
            "config.yaml", yaml.safe_dump(dict(job.config), sort_keys=False, default_flow_style=None)
        )
    return folder


def _locate(job: Job, *, make: bool) -> tuple[RunFolder, str | None]:
    """Prepare the method; return the job's folder and the SHA-256 of the calibration or file that the method uses."""
    used = prepare_method(job)
    identity, kind = identify(job, used), find_sample_kind(job.model)
    if make:
        import_run(job.model.name, identity, job.settings.runs_dir, job.settings.runs_dirs)
    return RunFolder(job.settings.runs_dir, job.model.name, identity, kind=kind, make=make), used


def _is_whole(path: Path) -> bool:
    """Return whether a YAML file is there and holds keys."""
    try:
        return isinstance(yaml.safe_load(path.read_bytes()), dict)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return False
