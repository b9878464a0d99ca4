"""Costs of generation: tokens, bytes and seconds of each sample, its rows after each segment, and a run's summary."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.engine.ledger import Ledger, Step, find_utilisation
from kvbench.engine.memory import cache_bytes, paper_mib
from kvbench.runs.record.results import MAX_LOAD, Latency, Memory

DIGITS = 5
"""Number of decimals of a record's values about rows."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Costs of a sample's batch, from its line of samples.jsonl; `Memory` describes the other attributes.

    Attributes:
        seconds: time of the batch divided by its prompts.
        tokens: tokens of its text; None for an image.
        longest: tokens of the longest row between segments; None if there are no rows.
        protected_drops: protected slots that were dropped in this sample; None if none were.
        bytes_read: bytes that attention read from the cache for the sample; None in records of earlier versions.
        processes: processes that share the model, whose memory is summed; None for one.
        device: torch device.
        machine: its processor (`describe_machine`).
        load: threads per processor during the batch, see `find_load`.
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
    bytes_read: int | None = None
    sequence_bytes: int
    last_bytes: int
    device: str
    machine: str
    load: float

    @property
    def condition(self) -> tuple[int, str, str, bool]:
        """Batch size, kind of device, machine, and whether it was busy: times of one condition are comparable."""
        return self.batch, self.device.partition(":")[0], self.machine, self.load > MAX_LOAD


@dataclass(frozen=True)
class Trace:
    """Contents of a sample's rows after each segment, in its record; empty if no queries are watched."""

    steps: tuple[Step, ...] = ()


MAX_COSTS = (
    "batch", "peak_tokens", "peak_bytes", "rebuild_bytes", "transient_bytes", "state_bytes", "gpu_peak_bytes",
    "sequence_bytes",
)  # fmt: skip
"""Costs of which the maximum over batches is reported."""
LAST_COSTS = ("last_tokens", "last_bytes")
"""Costs whose minimum over images, or over the longest texts, is the run's: a short text may end before B is full."""


def describe_rows(
    ledger: Ledger, spec: ModelSpec, number: int, drawn: int | None, watched: bool
) -> dict[str, object]:
    """Return the fields about rows in the record of sample `number` of a batch, a text of `drawn` tokens or an image.

    They describe the sample's first sequence. Segments are recorded only if queries are `watched`.
    """
    steps = ledger.trace(spec, number, drawn)
    if not steps:
        return {}
    used = find_utilisation(steps)
    fields: dict[str, object] = {"longest": max(step.longest for step in steps)}
    fields |= {} if used is None else {"utilisation": round(used, DIGITS)}
    if watched:
        values = ({name: value for name, value in asdict(step).items() if name != "n"} for step in steps)
        fields["steps"] = [
            {name: round(value, DIGITS) for name, value in step.items() if value is not None}
            for step in values
        ]
    return fields


def average_steps(traces: Sequence[Sequence[Step]]) -> tuple[Step, ...]:
    """Return the mean of several samples' steps by segment, over the samples that reached it."""
    together: dict[int, list[Step]] = {}
    for step in (step for trace in traces for step in trace):
        together.setdefault(step.tokens, []).append(step)
    return tuple(average_step(together[tokens]) for tokens in sorted(together))


def average_step(steps: Sequence[Step]) -> Step:
    """Return the mean contents of several sequences after a segment; `tokens` is the largest, `n` the sum."""
    return Step(
        tokens=max(step.tokens for step in steps),
        held=fmean(step.held for step in steps),
        longest=fmean(step.longest for step in steps),
        lse=_mean([step.lse for step in steps]),
        kept_lse=_mean([step.kept_lse for step in steps]),
        n=sum(step.n for step in steps),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def summarise_memory(costs: Sequence[Cost], spec: ModelSpec, budget: Budget, itemsize: int) -> Memory:
    """Return the worst costs of all batches, with capacity B and the full cache; `itemsize` in bytes."""
    worst: dict[str, Any] = {name: max(getattr(cost, name) for cost in costs) for name in MAX_COSTS}
    tokens = [cost.tokens or 0 for cost in costs]
    longest_text = max(tokens)
    lasts = [cost for cost in costs if (cost.tokens or 0) == longest_text]
    worst |= {name: min(getattr(cost, name) for cost in lasts) for name in LAST_COSTS}
    worst["least_share"] = min(cost.least_share for cost in costs)
    names = ("lse_drift", "longest", "gpu_reserved_bytes", "utilisation")
    values = ([value for cost in costs if (value := getattr(cost, name)) is not None] for name in names)
    (drifts, longest, reserved, used), batch = values, worst["batch"]
    unprotected = sum(cost.protected_drops or 0 for cost in costs)
    read = [cost.bytes_read for cost in costs if cost.bytes_read is not None]
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
        bytes_read=sum(read) / (sum(tokens) or len(costs)) if len(read) == len(costs) else None,
    )


def summarise_latency(costs: Sequence[Cost]) -> Latency:
    """Return mean, median and throughput over the samples of a run that ran under the most common condition.

    Of conditions with equally many samples, the one with the larger batch counts, then the earlier one.
    """
    numbers = Counter(cost.condition for cost in costs)
    chosen = max(numbers, key=lambda one: (numbers[one], one[0]))
    total, costs = len(costs), [cost for cost in costs if cost.condition == chosen]
    seconds = [cost.seconds for cost in costs]
    tokens = [cost.tokens for cost in costs if cost.tokens is not None]
    batch, _, machine, busy = chosen
    return Latency(
        seconds_per_image=sum(seconds) / len(seconds),
        seconds_per_image_median=median(seconds),
        images_per_second=len(seconds) / sum(seconds),
        batch=batch,
        device=costs[0].device,
        tokens_per_second=sum(tokens) / sum(seconds) if len(tokens) == len(costs) else None,
        samples=len(costs),
        others=total - len(costs),
        machine=machine,
        busy=busy,
    )
