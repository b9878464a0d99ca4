"""Time of one generation by phase, measured by wrapping calls."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.recording.graphs import GraphRecorder
from kvbench.models.base import Calls

REST = "rest"
"""Phase of everything outside the watched calls."""
RECORDED = "recorded"
"""Phase of repeated recordings, in which calls cannot be told apart."""


class HostClock:
    """Wall-clock time of the host; on a GPU, `wait` must precede `mark`, otherwise launches are timed, not kernels."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def mark(self) -> float:
        """Return the present time in seconds, for `between`."""
        return time.perf_counter()

    def wait(self) -> None:
        """Synchronise with a GPU, which `between` requires."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def between(self, start: float, stop: float) -> float:
        """Return the seconds between two marks."""
        return stop - start


class StreamClock(HostClock):
    """Time on the current CUDA stream: marks are events, which do not synchronise."""

    def mark(self) -> Any:
        """Record an event on the stream and return it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, start: Any, stop: Any) -> float:
        """Return the seconds between two completed CUDA events."""
        return float(start.elapsed_time(stop)) / 1e3


class Phases:
    """Time of some work by phase: every moment counts for the innermost watched call, or for `REST`.

    Phases add up to the total. With `StreamClock`, the device's waits for the host count for the current phase.
    """

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self._marking = False
        self._marks: list[tuple[str, Any]] = []
        self._stop: Any = None

    def run(self, work: Callable[[], object], calls: Calls) -> None:
        """Run a callable and time its phases; `calls` has (object, name of a method) pairs by phase."""
        self._clock.wait()
        self._marks = [(REST, self._clock.mark())]
        with self._set_marking(True), _replace(calls, self.watch):
            work()
        self._stop = self._clock.mark()
        self._clock.wait()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of `REST` and of every phase that occurred."""
        stops = [mark for _, mark in self._marks[1:]] + [self._stop]
        seconds = {REST: 0.0}
        for (phase, start), stop in zip(self._marks, stops, strict=True):
            seconds[phase] = seconds.get(phase, 0.0) + self._clock.between(start, stop)
        return seconds

    def total(self) -> float:
        """Return the seconds from the start to the end of the work."""
        return self._clock.between(self._marks[0][1], self._stop)

    def watch(self, phase: str, call: Callable[..., object]) -> Callable[..., object]:
        """Return a function whose calls are timed as a phase of the work."""

        @functools.wraps(call)
        def watched(*args: object, **kwargs: object) -> object:
            if not self._marking:
                return call(*args, **kwargs)
            outer = self._marks[-1][0]
            self._enter(phase)
            try:
                return call(*args, **kwargs)
            finally:
                self._enter(outer)

        return watched

    def watch_recorder(self, record: GraphRecorder) -> GraphRecorder:
        """Return a recorder whose repetitions are the phase `RECORDED`; recorded calls are not watched."""
        return _WatchedRecorder(record, self)

    @contextmanager
    def _set_marking(self, marking: bool) -> Iterator[None]:
        before, self._marking = self._marking, marking
        try:
            yield
        finally:
            self._marking = before

    def _enter(self, phase: str) -> None:
        self._marks.append((phase, self._clock.mark()))


class _WatchedRecorder:
    """Recorder of `Phases.watch_recorder`."""

    def __init__(self, record: GraphRecorder, phases: Phases) -> None:
        self._record, self._phases = record, phases
        self.make_room, self.clear = record.make_room, record.clear

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """Record work without marks, which would be recorded too."""
        with self._phases._set_marking(False):
            out, repeat = self._record(work)
        return out, self._phases.watch(RECORDED, repeat)


@contextmanager
def _replace(calls: Calls, wrap: Callable[[str, Callable[..., object]], object]) -> Iterator[None]:
    """Wrap methods of objects, not of their classes, until the block ends."""
    owners = [(phase, owner, name) for phase, pairs in calls.items() for owner, name in pairs]
    try:
        for phase, owner, name in owners:
            setattr(owner, name, wrap(phase, getattr(owner, name)))
        yield
    finally:
        for _, owner, name in owners:
            vars(owner).pop(name, None)
