"""Calibrations of a job, found or made, and the preparation of its method."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from kvbench.core.bars import make_bar
from kvbench.core.budget import Budget
from kvbench.core.files import hash_path, hash_values
from kvbench.engine.coding.codebooks import Codebooks
from kvbench.engine.coding.formats import CODEBOOK_REVISION, CodebookTensors
from kvbench.engine.packed.bytes import fit_budget
from kvbench.eval.files.kinds import TEXTS
from kvbench.forced.decoding import ForcedOutputs
from kvbench.methods.shared.calibration import Artifact, Observer
from kvbench.prompts.base import hash_prompts
from kvbench.runs.calibrate import calibrate, load_artifact, save_artifact
from kvbench.runs.code import find_inner_classes, identify_code
from kvbench.runs.job import Job
from kvbench.runs.record.merge import import_calibration

PIXEL_SETTINGS = ("decoder_dtype", "rounding")
"""Settings of a model that change the pixels of decoded latents but no calibration."""


class UsedFile(NamedTuple):
    """File of a calibration, or a file that the user gives in its place.

    Attributes:
        name: value in a run's identity: a calibration's name, which identifies all its inputs and is equal on every
            machine; the SHA-256 of a given file.
        sha256: SHA-256 of its content.
    """

    name: str
    sha256: str


class Calibrations(NamedTuple):
    """Calibrations of a job and their files.

    Attributes:
        artifact: calibration of the method; None if it needs none.
        artifact_file: its file, or the file that the method reads instead.
        codebooks: static codebooks; None if none are needed.
        codebooks_file: their file.
    """

    artifact: Artifact | None = None
    artifact_file: UsedFile | None = None
    codebooks: CodebookTensors | None = None
    codebooks_file: UsedFile | None = None

    @property
    def digests(self) -> dict[str, str | None]:
        """SHA-256 of the calibrations' files by key of provenance.json; None if there is no file."""
        files = {"calibration_sha256": self.artifact_file, "codebooks_sha256": self.codebooks_file}
        return {name: file and file.sha256 for name, file in files.items()}


def calibrate_job(job: Job) -> Calibrations:
    """Return the calibrations of a job, whose model is loaded; make and save missing ones.

    Raises:
        Busy: another process makes a calibration, and the job does not wait.
    """
    needs, observer = job.method.needs(), job.cache_plan.codebooks
    artifact = observe(job, [needs])[0] if isinstance(needs, Observer) else None
    codebooks = None if observer is None else observe(job, [observer])[0].tensors
    files: list[UsedFile | None] = [None, None]
    for number, path in enumerate(find_used_files(job)):
        if path is not None:
            sha256 = hash_path(path)
            files[number] = UsedFile(sha256 if path == needs else path.stem, sha256)
    return Calibrations(artifact, files[0], codebooks, files[1])


def find_used_files(job: Job) -> tuple[Path | None, Path | None]:
    """Return the files of the method (calibrated or given) and of static codebooks; None if not needed.

    The model is loaded if anything is calibrated.
    """
    needs, observer = job.method.needs(), job.cache_plan.codebooks
    return (
        locate_calibration(job, needs)[0] if isinstance(needs, Observer) else needs,
        None if observer is None else locate_calibration(job, observer)[0],
    )


def prepare_method(job: Job, artifact: Artifact | None) -> Budget:
    """Prepare a job's method; return its budget, whose capacity in low-bit storage may exceed the requested one."""
    plan, spec = job.cache_plan, job.cache_plan.spec
    job.method.calibrated_spec = spec
    if job.longest is not None:
        spec = spec.with_prompt(job.longest.tokens)
    shard = replace(job.budget.take_share(job.model.spec, plan.spec), full=spec.full_tokens)
    if plan.packing is not None:
        shard = fit_budget(job.method, spec, shard, artifact, plan.packing)
    job.method.prepare(spec, shard, artifact)
    return job.budget if plan.packing is None else job.method.budget


def observe(job: Job, observers: Sequence[Observer]) -> list[Artifact]:
    """Return calibrations of a loaded model; missing ones are made in one pass and saved.

    Processes that need the same calibration wait for the first one to make it.

    Raises:
        Busy: another process makes a calibration, and the job does not wait.
    """
    files = [locate_calibration(job, observer) for observer in observers]
    for path, _ in files if job.settings.runs_dirs else ():
        import_calibration(path, job.settings.runs_dirs)
    with ExitStack() as claims:
        # Sorted, so that no two processes wait for each other.
        for path in sorted({path for path, _ in files if not path.is_file()}):
            claims.enter_context(job.hold(path.with_name(f".{path.stem}")))
        if missing := [i for i, (path, _) in enumerate(files) if not path.is_file()]:
            prompts, settings = job.calibration_prompts, job.settings
            with make_bar(total=len(prompts), desc="calibration", unit="prompt") as bar:
                chosen = [observers[i] for i in missing]
                seed, batch = settings.calibrate.seed, _choose_batch_size(job)
                results = calibrate(
                    job.model, prompts, chosen, seed, settings.device, bar.update, batch, settings.noise
                )
            for i, tensors in zip(missing, results, strict=True):
                path, metadata = files[i]
                save_artifact(path, Artifact(observers[i].kind, tensors, metadata))
    return [
        load_artifact(path, observer.kind, metadata)
        for observer, (path, metadata) in zip(observers, files, strict=True)
    ]


def locate_calibration(job: Job, observer: Observer) -> tuple[Path, dict[str, object]]:
    """Return the path and the expected metadata of a calibration; the model is loaded."""
    metadata: dict[str, object] = {
        "kind": observer.kind,
        "observer": repr(observer),
        "model": job.model.name,
        "weights_sha256": job.model.weights_sha256,
        "sizes": [[s.height, s.width] for s in job.model.spec.segments],
        "settings": {name: value for name, value in job.model_settings.items() if name not in PIXEL_SETTINGS},
        "prompts": len(job.calibration_prompts),
        "prompts_sha256": hash_prompts(job.calibration_prompts),
        "seed": job.settings.calibrate.seed,
        "device": torch.device(job.settings.device).type,
        "batch_invariant": job.settings.batch_invariant,
        "noise": job.settings.noise,
        "batch": 1 if observer.uses.codebooks else _choose_batch_size(job),
    }
    if observer.uses.codebooks:
        metadata["codebooks"] = f"{Codebooks()!r}, revision {CODEBOOK_REVISION}"
    classes = {"method": tuple(find_inner_classes(observer)), "model": job.classes["model"]}
    if code := {
        part: sha256 for part, several in classes.items() if (sha256 := identify_code(part, several))
    }:
        metadata["code"] = code
    name = f"calibration-{hash_values(metadata)[:10]}.safetensors"
    return job.settings.runs_dir / job.model.name / name, metadata


def _choose_batch_size(job: Job) -> int:
    """Return the batch size of a calibration; 1 for generated texts, which end at different lengths."""
    writes = isinstance(job.model, ForcedOutputs) or not job.reads
    if job.model.identified.output == TEXTS.kind and writes:
        return 1
    return min(job.settings.calibrate.batch_size, len(job.calibration_prompts))
