"""One generation under torch's profiler: a trace for a browser and the operators that cost most."""

from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

import torch
from torch.profiler import ProfilerActivity, profile


class Operator(TypedDict):
    """An operator (on a GPU: a kernel or an operator that launches some) with its calls and its own seconds."""

    name: str
    calls: int
    self_seconds: float


def trace(work: Callable[[], object], path: Path, device: str, max_: int = 15) -> list[Operator]:
    """Write a Chrome trace (chrome://tracing, ui.perfetto.dev) of some work.

    Args:
        work: what to trace.
        path: a .json file.
        device: torch device; on a GPU seconds are the device's, else the CPU's.
        max_: operators to return.

    Returns:
        Operators by time of their own, without what they call, longest first.

    Raises:
        OSError: the file cannot be written.
    """
    gpu = torch.device(device).type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=activities) as watched:
        work()
        if gpu:
            torch.cuda.synchronize(device)
    watched.export_chrome_trace(str(path))
    attribute = "self_device_time_total" if gpu else "self_cpu_time_total"
    operators = [
        Operator(name=event.key, calls=int(event.count), self_seconds=getattr(event, attribute) / 1e6)
        for event in watched.key_averages()
    ]
    return sorted(operators, key=lambda operator: -operator["self_seconds"])[:max_]
