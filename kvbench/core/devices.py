"""Memory of the process and its devices: allocator settings and recovery from out-of-memory errors."""

import ctypes
import sys
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

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


def reserve(size: int, device: torch.device | str) -> None:
    """Let a GPU's allocator take so many bytes as one piece, of which it cuts what is asked for from then on.

    Tensors that grow from scale to scale would otherwise each take a new piece, none of which holds the next.
    """
    if torch.device(device).type == "cuda":
        torch.empty(size, dtype=torch.uint8, device=device)  # freed at once, and kept by the allocator


def send(numbers: Tensor, device: torch.device | str) -> Tensor:
    """Copy a CPU's numbers to a device; a GPU fetches them when it comes to it, and nobody waits until it has."""
    if torch.device(device).type != "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def if_it_fits(work: Callable[[], T], release: Callable[[], object] = lambda: None) -> T | None:
    """Result of some work, None when memory did not suffice for it; any other error is raised.

    Args:
        work: what may need too much.
        release: lets go of what it has left behind, before a GPU's free memory is given back.
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
