"""Table of the steps of the check, in order."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.gpu_steps.base import Case, Machine


@dataclass(frozen=True)
class Step:
    """One step, which runs in a separate process.

    Attributes:
        name: name of its module in `benchmarks.gpu_steps`.
        title: short description.
        limit: timeout in seconds.
        interprets: whether a rehearsal interprets Triton kernels; else it compiles them.
    """

    name: str
    title: str
    limit: int
    interprets: bool = True

    @property
    def list_cases(self) -> Callable[[Machine], Iterator[Case]]:
        """Function of its module that yields its cases."""
        module = importlib.import_module(f"benchmarks.gpu_steps.{self.name}")
        cases: Callable[[Machine], Iterator[Case]] = module.list_cases
        return cases


STEPS = {
    step.name: step
    for step in (
        Step("machine", "versions, the card, every kernel compiled for its limits", 120, interprets=False),
        Step("kernels", "kernels against double precision, a graph", 120),
        Step("models", "embedded models against the CPU, in float32 and 16 bits", 180),
        Step("graphs", "graphs on and off, out of memory", 60),
        Step("cards", "two cards: the same bytes, two workers, tensor parallelism", 90),
        Step("infinity", "Infinity-2B by random weights: time, idle time, memory, shares", 200),
        Step("llamagen", "LlamaGen-XL by random weights: tokens per second, noise", 120),
        Step("paths", "attention paths measured", 300),
    )
}
