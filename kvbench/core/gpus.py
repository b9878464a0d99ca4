"""Default device of a run, found without importing torch, which takes seconds."""

import ctypes
import os
import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

AUTO = "auto"
"""Setting for the device that `resolve_device` finds."""


def resolve_noise(name: str, device: str) -> str:
    """Return a kind of noise; `auto` is `counter` on a GPU, so that it never waits for the CPU, else `stream`."""
    return name if name != AUTO else "counter" if device.startswith("cuda") else "stream"


def resolve_device(name: str) -> str:
    """Return a torch device; `auto` is `$KVBENCH_DEVICE` if set, else `cuda` if there is a GPU, else `cpu`.

    A GPU counts if NVIDIA's driver lists it, `CUDA_VISIBLE_DEVICES` does not hide it, and torch is built for CUDA.
    """
    if name != AUTO:
        return name
    if chosen := os.environ.get("KVBENCH_DEVICE"):
        return chosen
    count = _count_gpus()
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    visible = int(first) < count if first.isdecimal() else re.match("GPU-|MIG-", first) is not None
    return "cuda" if count and visible and _is_torch_for_cuda() else "cpu"


@lru_cache
def _count_gpus() -> int:
    """Return the driver's number of GPUs, without creating a CUDA context."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return 0
    nvml.nvmlShutdown()
    return count.value


def _is_torch_for_cuda() -> bool:
    spec = find_spec("torch")
    return spec is not None and Path(str(spec.origin)).with_name("lib").joinpath("libtorch_cuda.so").is_file()
