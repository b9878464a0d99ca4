"""Timing of runs that take turns in one process."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvbench.profile.stopwatch import HostClock

Clock = Callable[[], float]


class Timed(NamedTuple):
    """Median seconds of a run and the result of its last repetition."""

    seconds: float
    result: Any


def choose_clock(cpu_time: bool, device: str = "cpu") -> Clock:
    """Return a clock of processor time or wall time, in seconds; on a GPU one of wall time that waits for its work."""
    if not device.startswith("cuda"):
        return time.process_time if cpu_time else time.perf_counter
    clock = HostClock(device)

    def wait_and_read() -> float:
        clock.wait()
        return clock.mark()

    return wait_and_read


def take_turns(
    runs: Mapping[str, Callable[[], object]], repeats: int, clock: Clock, warmups: int = 1
) -> dict[str, Timed]:
    """Measure runs in turns, after rounds of warm-up, so that changes of load affect all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    results: dict[str, object] = {}
    for repeat in range(warmups + repeats):
        for name, run in runs.items():
            started = clock()
            results[name] = run()
            if repeat >= warmups:
                seconds[name].append(clock() - started)
    return {name: Timed(statistics.median(times), results[name]) for name, times in seconds.items()}
