"""Kernels that a device ran, by torch's profiler, and the share of the time that it was idle."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_steps.base import Machine


class Span(NamedTuple):
    """Run of a kernel on the device, in microseconds."""

    start: float
    end: float
    name: str


def trace(machine: Machine, work: Callable[[], object]) -> list[Span]:
    """Return the kernels that the device ran during `work`, in order, from torch's profiler.

    A rehearsal counts CPU operations as kernels.
    """
    kind = DeviceType.CPU if machine.interpreted else DeviceType.CUDA
    activities = [ProfilerActivity.CPU if machine.interpreted else ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        work()
        torch.cuda.synchronize(machine.device)
    events = (event for event in profiler.events() if event.device_type == kind)
    return sorted(Span(event.time_range.start, event.time_range.end, event.name) for event in events)


def list_longest(spans: Iterable[Span], count: int) -> dict[str, dict[str, float]]:
    """Return total milliseconds and runs of the slowest kernels, by name."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for span in spans:
        times[span.name].append(span.end - span.start)
    longest = sorted(times, key=lambda name: -sum(times[name]))[:count]
    return {name: {"ms": round(sum(times[name]) / 1e3, 2), "runs": len(times[name])} for name in longest}


def find_idle(spans: Iterable[tuple[float, float]]) -> float:
    """Return the idle share of the time from the first start to the last end; raise `ValueError` without spans."""
    ordered = sorted(spans)
    if not ordered:
        raise ValueError("the profiler recorded nothing on the device")
    first, end = ordered[0][0], ordered[0][0]
    busy = 0.0
    for start, stop in ordered:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1 - busy / max(end - first, 1e-9)
