"""Trace of one generation by torch's profiler, and its most expensive operators."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

MAX_OPERATORS = 15
"""Maximum number of operators that are returned."""


def trace(work: Callable[[], object], path: Path, device: str) -> list[dict[str, object]]:
    """Write a Chrome trace (chrome://tracing, ui.perfetto.dev) of some work and return its operators.

    They have name, calls and own seconds (without callees), the longest first; on a GPU kernels are operators.

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
    events = sorted(watched.key_averages(), key=lambda event: -getattr(event, attribute))
    return [
        {"name": e.key, "calls": int(e.count), "self_seconds": getattr(e, attribute) / 1e6}
        for e in events[:MAX_OPERATORS]
    ]
