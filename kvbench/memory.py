"""Memory of a KV cache in tokens, in real bytes, and in the unit the papers print; memory of the process."""

import ctypes
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from kvbench.segments import ModelSpec

T = TypeVar("T")

PAPER_BYTES = 6
"""Bytes per (token, channel) as the papers count: keys in fp32, values in 16 bits."""
MIB = 2**20


def cache_bytes(tokens: float, spec: ModelSpec, batch: int, itemsize: int) -> int:
    """Bytes of keys and values of `batch` prompts holding `tokens` per sequence."""
    return round(tokens * spec.head_dim * 2 * itemsize * spec.branches * batch)


def paper_mib(tokens: float, spec: ModelSpec, batch: int) -> float:
    """MiB as HeatKV and ScaleKV print them (38550 for Infinity-2B, batch 8, full cache)."""
    return tokens * spec.head_dim * PAPER_BYTES * spec.branches * batch / MIB


def keep_freed_memory() -> None:
    """Lets this process keep what it frees, where its C library gives large blocks back to the system at once (glibc).

    Otherwise every large tensor on a CPU is faulted in anew, page by page.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30)


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
