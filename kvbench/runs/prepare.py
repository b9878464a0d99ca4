"""Calibrations, given files and codebooks of a job: found or made, and its method prepared with them."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from tqdm import tqdm

from kvbench.core.files import hash_path
from kvbench.engine.coding.codebooks import Codebooks
from kvbench.engine.coding.formats import CODEBOOK_REVISION, Books
from kvbench.engine.packed.bytes import prepare_to_fit
from kvbench.methods.shared.base import Artifact, Observer
from kvbench.methods.shared.capabilities import ReadsCodebooks
from kvbench.prompts.base import hash_prompts
from kvbench.runs.calibrate import artifact_name, calibrate, load_artifact, save_artifact
from kvbench.runs.job import Job
from kvbench.runs.record.kinds import TEXTS, find_sample_kind
from kvbench.runs.record.merge import import_calibration


def prepare_method(job: Job) -> str | None:
    """Calibrate and prepare a job's method; return the SHA-256 of the calibration or file that it uses.

    The model is loaded if anything is to be calibrated.
    """
    artifact, used = artifact_for(job)
    read_books(job)
    prepare_to_fit(job.method, job.shard_spec, job.allowance.shard, artifact, job.packing)
    return used


def artifact_for(job: Job) -> tuple[Artifact | None, str | None]:
    """Return the calibration a method needs, found or made, and the SHA-256 of the artifact or given file it uses."""
    needs = job.method.needs()
    artifact = observe(job, [needs])[0] if isinstance(needs, Observer) else None
    used = file_used(job)
    return artifact, None if used is None else hash_path(used)


def file_used(job: Job) -> Path | None:
    """Return the calibration or the given file that a job's method works with; the model is loaded."""
    needs = job.method.needs()
    return calibration_file(job, needs)[0] if isinstance(needs, Observer) else needs


def read_books(job: Job) -> Books | None:
    """Return the static codebooks that a job wants, found or made; None if it wants none. The model is loaded."""
    codebooks = job.codebooks
    return None if codebooks is None else observe(job, [codebooks])[0].tensors


def books_used(job: Job) -> Path | None:
    """Return the file of the static codebooks that a job works with; the model is loaded."""
    codebooks = job.codebooks
    return None if codebooks is None else calibration_file(job, codebooks)[0]


def observe(job: Job, observers: Sequence[Observer]) -> list[Artifact]:
    """Return calibrations of a loaded model; missing ones are made in one pass and saved.

    Processes that miss the same calibration wait for the first of them to make it.

    Raises:
        Busy: another one makes it, and the job does not wait.
    """
    files = [calibration_file(job, observer) for observer in observers]
    for path, _ in files:
        import_calibration(path, job.settings.runs_dirs)
    with ExitStack() as claims:
        for path in sorted(
            {path for path, _ in files if not path.is_file()}
        ):  # in order: no two wait for each other
            claims.enter_context(job.hold(path.with_name(f".{path.stem}")))
        if missing := [i for i, (path, _) in enumerate(files) if not path.is_file()]:
            prompts, settings = job.calibration_prompts, job.settings
            with tqdm(total=len(prompts), desc="calibration", unit="prompt", leave=None) as bar:
                watching = [observers[i] for i in missing]
                seed, batch = settings.calibrate.seed, _choose_batch(job)
                tensors = calibrate(job.model, prompts, watching, seed, settings.device, bar.update, batch)
            for i, made in zip(missing, tensors, strict=True):
                path, metadata = files[i]
                save_artifact(path, Artifact(observers[i].kind, made, metadata))
    return [
        load_artifact(path, observer.kind, metadata)
        for observer, (path, metadata) in zip(observers, files, strict=True)
    ]


def calibration_file(job: Job, observer: Observer) -> tuple[Path, dict[str, object]]:
    """Return the path of a calibration and the metadata it must have; the model is loaded."""
    metadata: dict[str, object] = {
        "kind": observer.kind,
        "observer": repr(observer),
        "model": job.model.name,
        "weights_sha256": job.model.weights_sha256,
        "sizes": [[s.height, s.width] for s in job.model.spec.segments],
        "settings": job.model_settings,
        "prompts": len(job.calibration_prompts),
        "prompts_sha256": hash_prompts(job.calibration_prompts),
        "seed": job.settings.calibrate.seed,
        "device": torch.device(job.settings.device).type,
    }
    if isinstance(observer, ReadsCodebooks):
        metadata["codebooks"] = f"{Codebooks()!r}, revision {CODEBOOK_REVISION}"
    if job.settings.batch_invariant:
        metadata["batch_invariant"] = True
    # Earlier versions took one prompt at a time, as observers of codebooks do.
    if (batch := _choose_batch(job)) > 1 and not isinstance(observer, ReadsCodebooks):
        metadata["batch"] = batch
    return job.settings.runs_dir / job.model.name / artifact_name(metadata), metadata


def _choose_batch(job: Job) -> int:
    """Return how many prompts a calibration draws together: of texts one, since those of a batch end apart."""
    if find_sample_kind(job.model) is TEXTS:
        return 1
    return min(job.settings.calibrate.batch_size, len(job.calibration_prompts))
