"""Memory of the process and its devices: allocator settings and recovery from out-of-memory errors."""

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from kvbench.core.config import ConfigError

T = TypeVar("T")

_TF32_LOCK = threading.Lock()
_tf32_scopes = 0  # open scopes of `tf32` in this process


def keep_freed_memory() -> None:
    """Keep freed memory in this process, so that large CPU tensors cause no page faults again.

    By default, glibc returns large blocks to the system at once.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30)


def check_device(name: str) -> None:
    """Check that a device exists.

    Raises:
        ConfigError: torch knows no such device, or does not find the GPU.
    """
    try:
        device, count = torch.device(name), torch.cuda.device_count()
    except RuntimeError:
        raise ConfigError(f"device={name}: torch has no such device; give cpu or cuda") from None
    if device.type == "cuda" and (device.index or 0) >= count:
        gpus = f"cuda:0 to cuda:{count - 1} here" if count else "no GPU here; use device=cpu"
        raise ConfigError(f"device={name}: torch finds {gpus}")


def use_device(name: torch.device | str) -> None:
    """Make a device current in this thread; Triton launches kernels on the current device.

    On a GPU, the allocator uses expandable segments unless the user configures it, since free parts of fixed segments
    rarely fit a larger tensor. Convolutions in float32 do not use TF32, except in a scope of `tf32`.

    Raises:
        ConfigError: see `check_device`.
    """
    device = torch.device(name)
    if device.type != "cuda":
        return
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the variable below
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    check_device(str(name))
    with _TF32_LOCK:
        if not _tf32_scopes:
            torch.backends.cudnn.allow_tf32 = False
    torch.cuda.set_device(device.index or 0)  # torch needs an index


@contextmanager
def tf32(*, convolutions: bool, products: bool) -> Iterator[None]:
    """Choose whether convolutions and matrix products in float32 use TF32 in this block; restore both afterwards.

    torch has one setting per process. `use_device` of another thread does not change it before the block ends.
    """
    global _tf32_scopes
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    with _TF32_LOCK:
        before = cudnn.allow_tf32, matmul.allow_tf32
        cudnn.allow_tf32, matmul.allow_tf32 = convolutions, products
        _tf32_scopes += 1
    try:
        yield
    finally:
        with _TF32_LOCK:
            _tf32_scopes -= 1
            cudnn.allow_tf32, matmul.allow_tf32 = before


def count_gpus() -> int:
    """Return the number of GPUs that this process may use, without creating a CUDA context."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # torch would ask CUDA itself
        code = "import torch; print(torch.cuda.device_count())"
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return int(process.stdout)
    return torch.cuda.device_count()


def take_gpu(name: str, number: int) -> None:
    """Make one GPU visible, unless CUDA has started: N of `cuda:N`, else `number`, modulo the number of GPUs."""
    _, named, index = name.partition(":")
    if not name.startswith("cuda") or torch.cuda.is_initialized() or not (count := count_gpus()):
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[(int(index) if named else number) % count]


def reserve(size: int, device: torch.device | str) -> None:
    """Reserve `size` bytes as one block of a GPU's allocator.

    Otherwise each of the tensors that grow from segment to segment needs a new block.
    """
    if torch.device(device).type == "cuda":
        torch.empty(size, dtype=torch.uint8, device=device)  # freed at once, and kept by the allocator


def release_unused(device: torch.device | str) -> None:
    """Return unused memory of the allocator to the GPU, so that peaks count used memory only."""
    if torch.device(device).type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def pin(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a CPU tensor in pinned memory if the device is a GPU, else unchanged."""
    return tensor.pin_memory() if torch.device(device).type == "cuda" and not tensor.is_cuda else tensor


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device unless it is there; the copy to a GPU is asynchronous, from pinned memory."""
    return pin(tensor, device).to(device, non_blocking=True)


def run_or_none_if_oom(work: Callable[[], T], release: Callable[[], object] = lambda: None) -> T | None:
    """Return the result of `work`; None if it runs out of memory, after `release`. Other errors are raised."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        # Messages of torch's CPU allocator, and of cuBLAS without memory for its workspace.
        known = ("not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
        is_lack = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not is_lack and not any(message in str(error) for message in known):
            raise
    # After the handler, when the traceback no longer holds the tensors.
    release()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None
