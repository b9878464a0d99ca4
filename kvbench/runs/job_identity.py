"""Identity of a job: what decides the bytes of its samples, and the readable start of its file names."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from kvbench.core.files import hash_path
from kvbench.core.storage import CODE_DTYPES
from kvbench.engine.coding.formats import CODEBOOK_REVISION
from kvbench.methods.shared.base import ADDED
from kvbench.methods.shared.capabilities import mixes_precisions
from kvbench.runs.job import Job
from kvbench.runs.prepare import books_used
from kvbench.runs.record.folder import slug
from kvbench.runs.run_hash import Identity


def identify(job: Job, used: str | None) -> Identity:
    """Return the identity of a job; its model is loaded.

    Args:
        job: the run.
        used: SHA-256 of the calibration or file that its method uses.
    """
    needs = job.method.needs()
    given = str(needs) if isinstance(needs, Path) else object()  # where the file lies does not matter
    revised = {"revision": job.method.revision} if job.method.revision else {}
    return Identity(
        model=job.model_settings,
        weights=job.model.weights_sha256,
        method=identify_method(job.section("method"), given) | revised,
        calibration=used,
        budget=job.allowance.requested.exact,
        prompts=job.prompts_sha256,
        seed=job.settings.seed,
        cache_dtype=describe_dtype(job),
        label=label_of(job),
        bound=None if job.bounded is None else job.method_name,
        storage=_describe_storage(job),
        batch_invariant=job.settings.batch_invariant,
    )


def identify_method(section: Mapping[str, object], given: object) -> dict[str, object]:
    """Return the settings by which an identity knows a method, without those that change nothing.

    Args:
        section: the method's part of the configuration.
        given: path of a calibration file, as a value of some setting; the file's contents are identified elsewhere.
    """
    return {
        key: value
        for key, value in section.items()
        if value != given and (key not in ADDED or value != ADDED[key])
    }


def _name_codes(job: Job) -> str:
    """Return the name of numbers of fewer than 16 bits; empty where others are stored, or a method's own forms."""
    name = job.settings.cache_dtype
    return name if name in CODE_DTYPES and not mixes_precisions(job.method) else ""


def describe_dtype(job: Job) -> str:
    """Return the dtype of stored keys and values; of numbers in few bits what the configuration calls them."""
    return _name_codes(job) or str(job.dtype)


def _describe_storage(job: Job) -> dict[str, object] | None:
    """Return how numbers of fewer than 16 bits are stored, as an identity has it; codebooks are there."""
    packing, used = job.packing, books_used(job)
    if packing is None:
        return None
    books = {} if used is None else {"codebooks": hash_path(used), "revision": CODEBOOK_REVISION}
    return {**asdict(packing.storage), "codebooks": None, **books}


def label_of(job: Job) -> str:
    """Return the readable start of a job's file names: method, budget, and the unit or dtype if not the default."""
    codes = _name_codes(job)
    stored = f"-{codes}" if codes else ""
    if not job.method.budgeted:
        return slug(job.method_name) + stored
    unit = "" if job.allowance.requested.unit == "tokens" else f"-{job.allowance.requested.unit}"
    return f"{slug(job.method_name)}-{float(job.allowance.requested.share):.4g}{unit}{stored}"
