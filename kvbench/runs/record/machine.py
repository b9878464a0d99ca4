"""Processor that a batch runs on, and its load."""

import os
import platform
from functools import cache
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")
WAITED = Path("/proc/self/schedstat")
"""File of Linux whose second number is how long the main thread waited for a processor, in nanoseconds."""
LEAST_SHARE = 0.01
"""Minimum divisor in `find_load`, so that loads are at most 100."""


@cache
def describe_machine(device: str) -> str:
    """Return the name of a GPU, or of the processor (else its architecture) with the number of threads of torch."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = CPU_INFO.read_text(errors="replace").splitlines() if CPU_INFO.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = next(filter(None, names), platform.processor() or platform.machine())
    return f"{name}, {torch.get_num_threads()} threads"


def read_waited() -> float | None:
    """Return the seconds that this process has waited for a processor so far; None if the system does not report it."""
    return int(WAITED.read_text().split()[1]) / 1e9 if WAITED.is_file() else None


def find_load(before: float | None, seconds: float) -> float:
    """Return the threads per processor during a batch: 2 if this process waited half of the time for other processes.

    If the system does not report the wait, it is the load average of the last minute, which misses short work.

    Args:
        before: `read_waited` before the batch.
        seconds: time of the batch.
    """
    after = read_waited()
    if before is None or after is None:
        return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)
    return round(1 / max(LEAST_SHARE, 1 - (after - before) / seconds), 2)
