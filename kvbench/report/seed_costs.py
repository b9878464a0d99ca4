"""Memory, times and steps of several runs, as one run's."""

from collections.abc import Sequence
from dataclasses import fields, replace
from statistics import fmean

from kvbench.engine.ledger import Step
from kvbench.runs.record.results import Latency, Memory

LOWEST = ("last_tokens", "last_bytes", "least_share", "budget_tokens")
"""Numbers of `Memory` whose smallest value is the bound."""
AVERAGED = ("lse_drift", "utilisation")
"""Numbers of `Memory` whose mean counts; of all others the largest value is the bound."""


def combine_memory(every: Sequence[Memory]) -> Memory:
    """Return the bounds of several runs: the largest peaks, the smallest contents."""
    numbers: dict[str, object] = {}
    for field in fields(Memory):
        known = [value for one in every if isinstance(value := getattr(one, field.name), int | float)]
        if known:
            choose = min if field.name in LOWEST else fmean if field.name in AVERAGED else max
            numbers[field.name] = choose(known)
    return replace(every[0], **numbers)  # type: ignore[arg-type]


def average_latency(every: Sequence[Latency]) -> Latency:
    """Return the mean times of several runs, and their largest batch."""
    means: dict[str, object] = {}
    for field in fields(Latency):
        known = [value for one in every if isinstance(value := getattr(one, field.name), int | float)]
        if known:
            means[field.name] = max(known) if field.name == "batch" else fmean(known)
    return replace(every[0], **means)  # type: ignore[arg-type]


def average_steps(every: Sequence[Sequence[Step]]) -> tuple[Step, ...]:
    """Return the mean contents of a sequence after each segment that all runs have."""
    return tuple(
        Step(
            tokens=max(step.tokens for step in steps),
            held=fmean(step.held for step in steps),
            longest=fmean(step.longest for step in steps),
            lse=_average([step.lse for step in steps]),
            kept_lse=_average([step.kept_lse for step in steps]),
            n=sum(step.n for step in steps),
        )
        for steps in zip(*every, strict=False)
    )


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None
