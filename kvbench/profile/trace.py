"""One generation under torch's profiler: a trace for a browser and the operators that cost most."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def trace(work: Callable[[], object], path: Path, device: str, max_: int = 15) -> list[dict[str, object]]:
    """Write a Chrome trace (chrome://tracing, ui.perfetto.dev) of some work.

    Args:
        work: what to trace.
        path: a .json file.
        device: torch device; on a GPU seconds are the device's, else the CPU's.
        max_: operators to return.

    Returns:
        Name, calls and own seconds (without callees) of each operator, longest first; on a GPU kernels are operators.

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
        for e in events[:max_]
    ]
