"""Policy files (`task=export export.policy=`): a static method's decisions for inference engines (docs/deploy.md)."""

from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from kvbench.core import checkpoint
from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec
from kvbench.engine.schedule import Schedule, build_schedule, predict_row_lengths, sum_tokens
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Observer
from kvbench.runs.check import check_job
from kvbench.runs.generate.batch import load
from kvbench.runs.job import Job
from kvbench.runs.prepare import calibrate_job, prepare_method
from kvbench.version import __version__

VERSION = 1
"""Version of the format of policy files."""


def export_policy(job: Job, path: Path) -> None:
    """Write the decisions of a job's method; weights and prompts are loaded only for a calibration.

    Raises:
        ConfigError: the method is not static, the model is split over processes, or the file cannot be written.
        ValueError: the job or its method is invalid.
    """
    method = job.method
    if not method.static:
        raise ConfigError(
            f"export.policy={path}: method={job.method_name} decides from the cache while the model runs; take one "
            "that decides by position (docs/methods.md), such as heatkv, pricekv or streaming_llm"
        )
    if job.model.processes.count > 1:
        raise ConfigError(f"export.policy={path}: needs one process; set model.tensor_parallel=1")
    if isinstance(method.needs(), Observer) or job.cache_plan.codebooks is not None:
        check_job(job)
        load(job)
    calibrations = calibrate_job(job)
    prepare_method(job, calibrations.artifact)
    spec = method.spec
    schedule = build_schedule(spec, method)
    tensors = {"dropped_after": tabulate_drops(spec, schedule)}
    if method.uses.precisions:
        tensors |= tabulate_precisions(spec, method)
    try:
        checkpoint.save(
            path, tensors, describe_policy(job, schedule, calibrations.digests["calibration_sha256"])
        )
    except OSError as error:
        raise ConfigError(f"export.policy={path}: cannot be written ({error})") from None


def tabulate_drops(spec: ModelSpec, schedule: Schedule) -> Tensor:
    """Return the index of the segment after which each head evicts each token, int32 [L, H, positions].

    The index is the token's own segment if it is never cached, and K - 1 if it is never evicted. Positions end before
    the last segment.
    """
    segments = torch.arange(len(spec.segments) - 1, dtype=torch.int32)
    segments = segments.repeat_interleave(torch.tensor(spec.lengths[:-1], dtype=torch.int64))
    table = segments.repeat(spec.layers, spec.heads, 1)
    for (layer, segment), change in sorted(schedule.items()):
        positions = change.layout.positions
        head, slot = (positions >= 0).nonzero(as_tuple=True)
        table[layer, head, positions[head, slot]] = segment + 1
    return table


def tabulate_precisions(spec: ModelSpec, method: Method) -> dict[str, Tensor]:
    """Return the precision of each segment in each head: `bits`, uint8, and `shared`, bool, [K - 1, L, H]."""
    precisions = [
        [method.precisions(layer, segment) or () for layer in range(spec.layers)]
        for segment in spec.segments[:-1]
    ]
    tables = {
        name: torch.tensor([[[getattr(head, name) for head in row] for row in rows] for rows in precisions])
        for name in ("bits", "shared")
    }
    return tables | {"bits": tables["bits"].byte()}


def describe_policy(job: Job, schedule: Schedule, used: str | None) -> dict[str, object]:
    """Return a policy's metadata, JSON values; `used` is the SHA-256 of the prepared method's calibration."""
    spec, method, settings, packing = job.method.spec, job.method, job.settings, job.cache_plan.packing
    lengths = predict_row_lengths(spec, method, schedule)
    assert lengths is not None, "for a static method"
    return {
        "format": "kvbench.policy",
        "version": VERSION,
        "kvbench": __version__,
        "model": {
            "name": spec.name,
            "family": spec.family,
            "layers": spec.layers,
            "kv_heads": spec.heads,
            "query_heads": spec.heads * spec.group,
            "head_dim": spec.head_dim,
            "sequences_per_prompt": spec.branches,
            "weights_sha256": job.model.weights_sha256 or None,
        },
        "segments": [[segment.height, segment.width] for segment in spec.segments],
        "method": {"name": job.method_name, "settings": job.section("method")},
        "calibration_sha256": used,
        "budget": {
            "value": str(settings.budget),
            "unit": settings.budget_unit,
            "capacity_tokens": float(method.budget.capacity),
            "peak_tokens": int(sum_tokens(lengths).max()),
        },
        "cache_dtype": settings.cache_dtype,
        "storage": None if packing is None else asdict(packing.storage),
    }
