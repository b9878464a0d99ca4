"""Tokens in each sample's rows after every segment: from the ledger to its record, and averaged over a run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from torch import Tensor

from kvbench.core.segments import ModelSpec
from kvbench.engine.ledger import Ledger, Step, find_utilisation
from kvbench.models.outputs import Outputs

DIGITS = 5


@dataclass(frozen=True)
class Trace:
    """The part of a sample's record that says what it held after each segment; empty where no queries are watched."""

    steps: tuple[Step, ...] = ()


def describe_rows(
    ledger: Ledger, spec: ModelSpec, number: int, made: Outputs, watched: bool
) -> dict[str, object]:
    """Return what the record of one sample of a batch says of its rows, JSON values.

    Args:
        ledger: of the batch.
        spec: the whole model's shapes.
        number: of the sample in the batch, whose first sequence this is about.
        made: what became of the batch.
        watched: whether queries were watched; otherwise segments are not recorded.
    """
    steps = ledger.trace(spec, number, None if isinstance(made, Tensor) else made[number].tokens)
    if not steps:
        return {}
    used = find_utilisation(steps)
    found: dict[str, object] = {"longest": max(step.longest for step in steps)}
    found |= {} if used is None else {"utilisation": round(used, DIGITS)}
    return found | ({"steps": [_write_step(step) for step in steps]} if watched else {})


def _write_step(step: Step) -> dict[str, object]:
    values = {name: value for name, value in asdict(step).items() if value is not None and name != "n"}
    return {name: round(value, DIGITS) for name, value in values.items()}


def average_steps(traces: Sequence[Sequence[Step]]) -> tuple[Step, ...]:
    """Return the mean of several samples' steps, segment by segment, each over the samples that came so far."""
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
