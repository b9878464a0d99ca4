"""Batch-invariance mode: whether a row's attention may depend on the other rows of its batch.

The mode belongs to the process, like torch's settings for TF32 and deterministic algorithms. Without it, kernels on a
GPU choose tile sizes and the number of programs per row so that the batch fills the device; each choice sums the same
values in another order.
"""

from typing import Any

import torch

FLAGS = (
    "allow_tf32",
    "allow_fp16_accumulation",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
)
"""Settings of `torch.backends.cuda.matmul` that permit rounding inside matrix products."""
MATMUL: Any = torch.backends.cuda.matmul
Allowed = bool | tuple[bool, bool]
"""A permission, and, if torch has it, the permission that several programs share a product's sums (split-K)."""
_before: dict[str, Allowed] | None = None  # permissions before the mode was set; None without the mode


def is_batch_invariant() -> bool:
    """Return whether a row's attention must have the same bytes in every batch."""
    return _before is not None


def set_batch_invariant(enabled: bool) -> None:
    """Set batch-invariance mode for this process; it is off at first.

    In this mode only the kernels of this package compute attention on a GPU, with one program for all keys of a row
    and fixed tile sizes, and torch's matrix products use neither TF32 nor 16-bit sums nor split-K. cuBLAS still chooses
    tiles by the size of a product, which depends on the batch.

    Args:
        enabled: false restores torch's settings.
    """
    global _before
    if enabled and _before is None:
        _before = {flag: _read(flag) for flag in FLAGS}
        for flag, allowed in _before.items():
            setattr(MATMUL, flag, (False, False) if isinstance(allowed, tuple) else False)
    elif not enabled and _before is not None:
        for flag, allowed in _before.items():
            setattr(MATMUL, flag, allowed)
        _before = None


def _read(flag: str) -> Allowed:
    allowed: bool = getattr(MATMUL, flag)
    split: bool | None = getattr(MATMUL, f"{flag}_split_k", None)
    return allowed if split is None else (allowed, split)
