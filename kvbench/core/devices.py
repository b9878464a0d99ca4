"""Memory of the process and its devices: allocator settings and recovery from out-of-memory errors."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from kvbench.core.config import ConfigError

T = TypeVar("T")


def keep_freed_memory() -> None:
    """Lets this process keep what it frees, where its C library gives large blocks back to the system at once (glibc).

    Otherwise every large tensor on a CPU is faulted in anew, page by page.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30)


def check_device(name: str) -> None:
    """Make sure that a device is there.

    Raises:
        ConfigError: it is a GPU that torch does not find.
    """
    device, found = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        there = f"cuda:0 to cuda:{found - 1} here" if found else "no GPU here; use device=cpu"
        raise ConfigError(f"device={name}: torch finds {there}")


def use_device(name: torch.device | str) -> None:
    """Make a device the current one of this thread, where Triton launches its kernels whatever their tensors are.

    On a GPU it also sets, unless the user has, how the allocator reserves memory: of segments of a fixed size, what is
    free would rarely fit a larger tensor. Convolutions in float32 are computed in float32, not in TF32.

    Raises:
        ConfigError: see `check_device`.
    """
    device = torch.device(name)
    if device.type != "cuda":
        return
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    check_device(str(name))
    torch.backends.cudnn.allow_tf32 = False
    torch.cuda.set_device(device.index or 0)  # a device without a number is refused


def count_gpus() -> int:
    """Return how many GPUs this process may use, without choosing them for good as a CUDA context does."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # torch would ask CUDA itself
        code = "import torch; print(torch.cuda.device_count())"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return int(found.stdout)
    return torch.cuda.device_count()


def take_gpu(name: str, number: int) -> None:
    """Let this process see one GPU alone, unless it has used one already: that of `cuda:N`, or the `number`-th in turn.

    Args:
        name: torch device; nothing is done unless it is a GPU.
        number: of the process or job among those that run side by side.
    """
    _, named, index = name.partition(":")
    if not name.startswith("cuda") or torch.cuda.is_initialized() or not (count := count_gpus()):
        return
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = seen[(int(index) if named else number) % count]


def reserve(size: int, device: torch.device | str) -> None:
    """Make a GPU's allocator reserve so many bytes as one block, from which it serves later requests.

    Tensors that grow from scale to scale would otherwise each need a new block.
    """
    if torch.device(device).type == "cuda":
        torch.empty(size, dtype=torch.uint8, device=device)  # freed at once, and kept by the allocator


def release_unused(device: torch.device | str) -> None:
    """Give a GPU's memory that the allocator holds and no tensor uses back, so that peaks begin at what is used."""
    if torch.device(device).type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def pin(numbers: Tensor, device: torch.device | str) -> Tensor:
    """Return numbers on the CPU in memory that a GPU copies from while the host goes on; for a CPU as they are."""
    return numbers.pin_memory() if torch.device(device).type == "cuda" else numbers


def send(numbers: Tensor, device: torch.device | str) -> Tensor:
    """Copy numbers from the CPU to a device; the copy to a GPU is asynchronous, from pinned memory."""
    return pin(numbers, device).to(device, non_blocking=True)


def if_it_fits(work: Callable[[], T], release: Callable[[], object] = lambda: None) -> T | None:
    """Return the result of some work; None when it ran out of memory. Any other error is raised.

    Args:
        work: what may run out of memory.
        release: drops what the work left behind, before the GPU's cache is emptied.
    """
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
    # Past the handler, so that the traceback no longer holds the tensors.
    release()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    # What torch's allocator says on a CPU, and cuBLAS when there is no room for its workspace.
    said = ("not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(one in str(error) for one in said)
