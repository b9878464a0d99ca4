"""Times of a generation on a device: seconds, and how long the device waits for the host."""

from collections.abc import Callable, Iterable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_steps.base import Machine
from benchmarks.support.timing import take_turns
from kvbench.profile.stopwatch import HostClock


def time_turns(machine: Machine, runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median seconds of runs that take turns, with what they left on the device."""
    clock = HostClock(machine.device)

    def wait_and_read() -> float:
        clock.wait()
        return clock.mark()

    return {name: timed.seconds for name, timed in take_turns(runs, repeats, wait_and_read).items()}


def measure_idle(machine: Machine, work: Callable[[], object]) -> float:
    """Return the share of some work's time in which the device runs no kernel, by torch's profiler.

    A rehearsal takes the operations of the CPU for kernels.
    """
    kind = DeviceType.CPU if machine.interpreted else DeviceType.CUDA
    activities = [ProfilerActivity.CPU if machine.interpreted else ProfilerActivity.CUDA]
    with profile(activities=activities) as watched:
        work()
        torch.cuda.synchronize(machine.device)
    spans = [(e.time_range.start, e.time_range.end) for e in watched.events() if e.device_type == kind]
    return find_idle(spans)


def find_idle(spans: Iterable[tuple[float, float]]) -> float:
    """Return the share of the time from the first start to the last end that no span covers.

    Raises:
        ValueError: there is no span.
    """
    ordered = sorted(spans)
    if not ordered:
        raise ValueError("the profiler saw nothing on the device")
    first, end = ordered[0][0], ordered[0][0]
    busy = 0.0
    for start, stop in ordered:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1 - busy / max(end - first, 1e-9)
