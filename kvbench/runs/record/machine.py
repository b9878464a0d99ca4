"""Processor that a batch runs on, and its load."""

import os
import platform
from functools import cache
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")


@cache
def describe_machine(device: str) -> str:
    """Return the name of a GPU, or of the processor with the number of threads of torch."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_name_processor()}, {torch.get_num_threads()} threads"


def find_load() -> float:
    """Return the load average of the last minute per processor."""
    return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)


def _name_processor() -> str:
    """Return the model of the processor; its architecture where the system does not tell."""
    lines = CPU_INFO.read_text(errors="replace").splitlines() if CPU_INFO.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), platform.processor() or platform.machine())
