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
    """Costs of a sample's batch, as in its line of samples.jsonl.

    Attributes:
        batch: prompts that were generated together.
        seconds: time of the batch over its prompts.
        peak_tokens: most tokens that one sequence held, summed over layers and heads.
        peak_bytes: storage of keys and values at the peak, all sequences of the batch together.
        rebuild_bytes: storage at the worst instant of a rebuild.
        transient_bytes: most bytes of keys and values in flight.
        state_bytes: most bytes the method kept beside keys and values.
        gpu_peak_bytes: the allocator's peak on a GPU; 0 on a CPU.
        last_tokens: tokens that one sequence held while the last segment ran.
        least_share: least share of min(B, all tokens so far) held after any segment.
        lse_drift: nats by which drops changed the log-sum-exp of watched queries, a mean; None where none are watched.
        tokens: tokens that its text was drawn in; None of an image.
        utilisation: tokens that its own sequence held over those of rows as long as the longest; None if none left.
        longest: tokens of the longest row that it ever had between segments; None if it had none.
        gpu_reserved_bytes: the most that the allocator reserved on a GPU; None on a CPU.
        processes: processes that held the model together, all of whose memory is counted; None of one.
        sequence_bytes: most bytes of keys and values that one sequence held.
        last_bytes: bytes that one sequence held while the last segment ran.
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
    sequence_bytes: int
    last_bytes: int


MAXIMA = (
    "batch", "peak_tokens", "peak_bytes", "rebuild_bytes", "transient_bytes", "state_bytes", "gpu_peak_bytes",
    "sequence_bytes",
)  # fmt: skip
"""Costs of which a run's is that of its largest batch."""
MINIMA = ("last_tokens", "least_share", "last_bytes")
"""Costs of which a run's is the smallest of all batches."""


def summarise_memory(costs: Sequence[Cost], spec: ModelSpec, budget: Budget, itemsize: int) -> Memory:
    """Return the worst of all batches, beside capacity B and the full cache.

    Args:
        costs: of every sample of a run.
        spec: the model.
        budget: capacity B.
        itemsize: bytes of a stored value.
    """
    found: dict[str, Any] = {name: max(getattr(cost, name) for cost in costs) for name in MAXIMA}
    found |= {name: min(getattr(cost, name) for cost in costs) for name in MINIMA}
    names = ("lse_drift", "longest", "gpu_reserved_bytes", "utilisation")
    known = ([value for cost in costs if (value := getattr(cost, name)) is not None] for name in names)
    (drifts, longest, reserved, used), batch = known, found["batch"]
    return Memory(
        **found,
        budget_tokens=float(budget.capacity),
        full_tokens=spec.full_tokens,
        full_bytes=cache_bytes(spec.full_tokens, spec, batch, itemsize),
        gpu_reserved_bytes=max(reserved, default=None),
        paper_full_mib=paper_mib(spec.full_tokens, spec, batch),
        paper_peak_mib=paper_mib(found["peak_tokens"], spec, batch),
        lse_drift=min(drifts) if len(drifts) == len(costs) else None,
        utilisation=fmean(used) if used else None,
        regular_tokens=spec.all_heads * max(longest) if len(longest) == len(costs) else None,
        budget_unit=budget.unit,
        budget_bytes=None if budget.bytes is None else float(budget.bytes),
        full_sequence_bytes=spec.full_bytes,
    )


def summarise_latency(costs: Sequence[Cost], device: str) -> Latency:
    """Return mean, median and throughput over the samples of a run that was generated on `device`."""
    seconds = [cost.seconds for cost in costs]
    drawn = [cost.tokens for cost in costs if cost.tokens is not None]
    return Latency(
        seconds_per_image=sum(seconds) / len(seconds),
        seconds_per_image_median=median(seconds),
        images_per_second=len(seconds) / sum(seconds),
        batch=max(cost.batch for cost in costs),
        device=device,
        tokens_per_second=sum(drawn) / sum(seconds) if len(drawn) == len(costs) else None,
    )
