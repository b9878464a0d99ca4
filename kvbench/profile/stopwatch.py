"""Time of one generation by phase, measured by wrapping calls."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvbench.models.base import Calls

REST = "rest"
"""Phase of everything that is not inside a watched call."""


class HostClock:
    """Wall-clock time of the host; on a GPU `wait` before a mark, or launches are timed instead of work.

    Args:
        device: what `wait` waits for.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def mark(self) -> float:
        """Return seconds since some fixed moment."""
        return time.perf_counter()

    def wait(self) -> None:
        """Synchronise a GPU, so that `between` may be called; on a CPU nothing is pending."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def between(self, start: float, stop: float) -> float:
        """Return the seconds from one mark to another."""
        return stop - start


class StreamClock(HostClock):
    """Time on the current CUDA stream: marks are events, so that nothing waits until all of them are taken."""

    def mark(self) -> Any:
        """Record an event on the stream and return it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, start: Any, stop: Any) -> float:
        """Return the seconds between two events that the device has passed."""
        return float(start.elapsed_time(stop)) / 1e3


class Phases:
    """A split of a stretch of time: every moment belongs to the innermost watched call, or to `REST`.

    The parts therefore add up to the whole, and a call inside another is not counted twice. On a stream, time during
    which the device waits for the host belongs to the phase that it waits in.

    Args:
        clock: takes the marks.
    """

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self._marks: list[tuple[str, Any]] = []
        self._stop: Any = None

    def run(self, work: Callable[[], object], calls: Calls) -> None:
        """Do some work and watch the calls in it."""
        self._clock.wait()
        self._marks = [(REST, self._clock.mark())]
        with _replace(calls, self._watch):
            work()
        self._stop = self._clock.mark()
        self._clock.wait()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of every phase that occurred, `REST` always among them."""
        stops = [mark for _, mark in self._marks[1:]] + [self._stop]
        found = {REST: 0.0}
        for (phase, start), stop in zip(self._marks, stops, strict=True):
            found[phase] = found.get(phase, 0.0) + self._clock.between(start, stop)
        return found

    def total(self) -> float:
        """Return the seconds from start to end."""
        return self._clock.between(self._marks[0][1], self._stop)

    def _watch(self, phase: str, call: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(call)
        def watched(*args: object, **kwargs: object) -> object:
            outer = self._open
            self._enter(phase)
            try:
                return call(*args, **kwargs)
            finally:
                self._enter(outer)

        return watched

    @property
    def _open(self) -> str:
        return self._marks[-1][0]

    def _enter(self, phase: str) -> None:
        self._marks.append((phase, self._clock.mark()))


@contextmanager
def _replace(calls: Calls, wrap: Callable[[str, Callable[..., object]], object]) -> Iterator[None]:
    """Wrap methods of these very objects, not of their classes, and undo it at the end."""
    owners = [(phase, owner, name) for phase, pairs in calls.items() for owner, name in pairs]
    try:
        for phase, owner, name in owners:
            setattr(owner, name, wrap(phase, getattr(owner, name)))
        yield
    finally:
        for _, owner, name in owners:
            vars(owner).pop(name, None)
