"""Tokens in each sample's rows after every segment: from the ledger to its record, and averaged over a run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from kvbench.core.segments import ModelSpec
from kvbench.engine.ledger import Ledger, Step, find_utilisation

DIGITS = 5


@dataclass(frozen=True)
class Trace:
    """Contents of a sample's rows after each segment, in its record; empty if no queries are watched."""

    steps: tuple[Step, ...] = ()


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
    return tuple(_average(together[tokens]) for tokens in sorted(together))


def _average(steps: Sequence[Step]) -> Step:
    return Step(
        steps[0].tokens,
        held=fmean(step.held for step in steps),
        longest=fmean(step.longest for step in steps),
        lse=_mean([step.lse for step in steps]),
        kept_lse=_mean([step.kept_lse for step in steps]),
        n=len(steps),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None
