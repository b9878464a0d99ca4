"""Timing of runs that take turns in one process."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvbench.profile.stopwatch import HostClock

Clock = Callable[[], float]


class Timed(NamedTuple):
    """Median seconds of a run, its last result, and the seconds of each repetition."""

    seconds: float
    result: Any
    turns: list[float]

    def compare(self, base: "Timed") -> tuple[float, str]:
        """Return the median ratio to another run of the same turns, and its 95 % interval.

        The interval is between order statistics of the ratios. Its level is at least 95 %, but lower below six turns.
        """
        ratios = sorted(turn / other for turn, other in zip(self.turns, base.turns, strict=True))
        left_out, tail = 0, 1 / 2 ** len(ratios)
        while (tail := tail + math.comb(len(ratios), left_out + 1) / 2 ** len(ratios)) <= 0.025:
            left_out += 1
        return statistics.median(ratios), f"{ratios[left_out]:.3f} to {ratios[-1 - left_out]:.3f}"


def choose_clock(cpu_time: bool, device: str) -> Clock:
    """Return a clock of processor time or wall time, in seconds; on a GPU one of wall time that waits for its work."""
    if not device.startswith("cuda"):
        return time.process_time if cpu_time else time.perf_counter
    clock = HostClock(device)

    def wait_and_read() -> float:
        clock.wait()
        return clock.mark()

    return wait_and_read


def take_turns(runs: Mapping[str, Callable[[], object]], repeats: int, clock: Clock) -> dict[str, Timed]:
    """Measure runs alternately, after a round of warm-up, so that changes of load affect all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    results: dict[str, object] = {}
    for repeat in range(1 + repeats):
        for name, run in runs.items():
            started = clock()
            results[name] = run()
            if repeat:
                seconds[name].append(clock() - started)
    return {name: Timed(statistics.median(times), results[name], times) for name, times in seconds.items()}
