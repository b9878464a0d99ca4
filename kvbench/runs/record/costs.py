"""Costs of generation: tokens, bytes and seconds of each sample, and their summary for a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.engine.memory import cache_bytes, paper_mib
from kvbench.runs.record.results import Latency, Memory


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Costs of a sample's batch, as in its line of samples.jsonl; see `Memory` for the other attributes.

    Attributes:
        seconds: time of the batch divided by its prompts.
        tokens: tokens of its text; None for an image.
        longest: tokens of the longest row between segments; None without rows.
        protected_drops: of this sample; None for none.
        processes: processes that share the model, whose memory is summed; None for one.
    """

    batch: int
    seconds: float
    peak_tokens: int
    peak_bytes: int
    rebuild_bytes: int
    transient_bytes: int
    state_bytes: int
    gpu_peak_bytes: int
    last_tokens: int
    least_share: float
    lse_drift: float | None = None
    tokens: int | None = None
    utilisation: float | None = None
    longest: int | None = None
    gpu_reserved_bytes: int | None = None
    processes: int | None = None
    protected_drops: int | None = None
    sequence_bytes: int
    last_bytes: int


MAX_COSTS = (
    "batch", "peak_tokens", "peak_bytes", "rebuild_bytes", "transient_bytes", "state_bytes", "gpu_peak_bytes",
    "sequence_bytes",
)  # fmt: skip
"""Costs whose maximum over batches is the run's."""
MIN_COSTS = ("last_tokens", "least_share", "last_bytes")
"""Costs whose minimum over batches is the run's."""


def summarise_memory(costs: Sequence[Cost], spec: ModelSpec, budget: Budget, itemsize: int) -> Memory:
    """Return the worst costs of all batches, with capacity B and the full cache; `itemsize` in bytes."""
    worst: dict[str, Any] = {name: max(getattr(cost, name) for cost in costs) for name in MAX_COSTS}
    worst |= {name: min(getattr(cost, name) for cost in costs) for name in MIN_COSTS}
    names = ("lse_drift", "longest", "gpu_reserved_bytes", "utilisation")
    values = ([value for cost in costs if (value := getattr(cost, name)) is not None] for name in names)
    (drifts, longest, reserved, used), batch = values, worst["batch"]
    unprotected = sum(cost.protected_drops or 0 for cost in costs)
    return Memory(
        **worst,
        budget_tokens=float(budget.capacity),
        full_tokens=spec.full_tokens,
        full_bytes=cache_bytes(spec.full_tokens, spec, batch, itemsize),
        gpu_reserved_bytes=max(reserved, default=None),
        paper_full_mib=paper_mib(spec.full_tokens, spec, batch),
        paper_peak_mib=paper_mib(worst["peak_tokens"], spec, batch),
        lse_drift=min(drifts) if len(drifts) == len(costs) else None,
        utilisation=fmean(used) if used else None,
        regular_tokens=spec.all_heads * max(longest) if len(longest) == len(costs) else None,
        budget_unit=budget.unit,
        budget_bytes=None if budget.bytes is None else float(budget.bytes),
        full_sequence_bytes=spec.full_bytes,
        protected_drops=unprotected or None,
    )


def summarise_latency(costs: Sequence[Cost], device: str) -> Latency:
    """Return mean, median and throughput over the samples of a run."""
    seconds = [cost.seconds for cost in costs]
    tokens = [cost.tokens for cost in costs if cost.tokens is not None]
    return Latency(
        seconds_per_image=sum(seconds) / len(seconds),
        seconds_per_image_median=median(seconds),
        images_per_second=len(seconds) / sum(seconds),
        batch=max(cost.batch for cost in costs),
        device=device,
        tokens_per_second=sum(tokens) / sum(seconds) if len(tokens) == len(costs) else None,
    )
