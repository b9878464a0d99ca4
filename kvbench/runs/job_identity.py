"""Identity of a job: everything that determines the bytes of its samples, and the label of its file names."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from kvbench.core.storage import CODE_DTYPES
from kvbench.engine.coding.formats import CODEBOOK_REVISION
from kvbench.methods.shared.base import Method
from kvbench.runs.code import identify_code
from kvbench.runs.job import Job
from kvbench.runs.prepare import Calibrations
from kvbench.runs.record.folder import slug
from kvbench.runs.run_hash import Identity


def identify(job: Job, calibrations: Calibrations) -> Identity:
    """Return the identity of a job; its model is loaded."""
    needs = job.method.needs()
    given = str(needs) if isinstance(needs, Path) else object()  # the file's location does not matter
    code = {part: sha256 for part, classes in job.classes.items() if (sha256 := identify_code(part, classes))}
    return Identity(
        model={**job.model_settings, "revision": job.model.revision},
        weights=job.model.weights_sha256,
        method=identify_method(job.section("method"), given, job.method),
        calibration=calibrations.artifact_file and calibrations.artifact_file.name,
        budget=job.budget.exact,
        prompts=job.prompts_sha256,
        seed=job.settings.seed,
        cache_dtype=describe_dtype(job),
        label=make_label(job),
        bound=None if job.bounded is None else job.method_name,
        storage=_describe_storage(job, calibrations),
        batch_invariant=job.settings.batch_invariant,
        noise=job.settings.noise,
        code=code or None,
    )


def identify_method(section: Mapping[str, object], given: object, method: Method) -> dict[str, object]:
    """Return the settings that identify a method, without the `given` path, and the revision of each class in it.

    A method around another one has its own revision; the inner settings have the inner method's revision.
    """
    settings = {key: value for key, value in section.items() if value != given}
    inner = {
        key: identify_method(value, given, getattr(method, key))
        for key, value in settings.items()
        if isinstance(value, Mapping) and isinstance(getattr(method, key, None), Method)
    }
    return {**settings, **inner, "revision": method.revision}


def _name_low_bit_dtype(job: Job) -> str:
    """Return the low-bit `cache_dtype`, or the bits of keys and values; empty for 16 bits and a method's precisions.

    Equal bits have one name, whether `cache_dtype` or `storage` sets them.
    """
    name = job.settings.cache_dtype
    if name not in CODE_DTYPES or job.method.uses.precisions:
        return ""
    packing = job.cache_plan.packing
    assert packing is not None
    keys, values = (side.bits for side in packing.sides)
    if keys != values:
        return f"k{keys}v{values}"
    return name if keys == packing.bits else f"int{keys}"


def describe_dtype(job: Job) -> str:
    """Return the dtype of stored keys and values; for low-bit storage, its name."""
    return _name_low_bit_dtype(job) or str(job.cache_plan.dtype)


def _describe_storage(job: Job, calibrations: Calibrations) -> dict[str, object] | None:
    """Return the settings of low-bit storage with the name of its codebooks; None for other storage.

    The dtype's name has the bits.
    """
    packing, codebooks = job.cache_plan.packing, calibrations.codebooks_file
    if packing is None:
        return None
    named = ("key_bits", "value_bits")
    settings = {name: value for name, value in asdict(packing.storage).items() if name not in named}
    used = {} if codebooks is None else {"codebooks": codebooks.name, "revision": CODEBOOK_REVISION}
    return {**settings, "codebooks": None, **used}


def make_label(job: Job) -> str:
    """Return the label of a job's file names: method, budget as given, and the unit and dtype if not the default."""
    low_bit = _name_low_bit_dtype(job)
    suffix = f"-{low_bit}" if low_bit else ""
    if not job.method.budgeted:
        return slug(job.method_name) + suffix
    budget = job.budget
    unit = "" if budget.unit == "tokens" else f"-{budget.unit}"
    return f"{slug(job.method_name)}-{budget.written}{unit}{suffix}"
