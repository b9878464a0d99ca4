"""Batch invariance of this process: whether a row's attention may depend on what else is in its batch.

A setting of the process, as torch's are for TF32 and deterministic algorithms. Kernels on a GPU otherwise choose sizes
of tiles, and how many programs share a row's keys, so that a batch of its size fills the device; each choice adds the
same numbers in another order.
"""

from typing import Any

import torch

FLAGS = (
    "allow_tf32",
    "allow_fp16_accumulation",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
)
"""Permissions to round inside matrix products, of `torch.backends.cuda.matmul`."""
MATMUL: Any = torch.backends.cuda.matmul
Allowed = bool | tuple[bool, bool]
"""A permission; with it, where torch has that, whether several programs may share a product's sums (split-K)."""
_before: dict[str, Allowed] | None = None  # the permissions as they were; None unless batches are invariant


def is_batch_invariant() -> bool:
    """Return whether a row's attention is to have the same bytes in every batch."""
    return _before is not None


def set_batch_invariant(wanted: bool) -> None:
    """Choose for this process, which begins without.

    With it attention on a GPU is computed by the kernels of this package alone, by one program for all keys of a row
    and in tiles of a fixed size, and torch's matrix products use neither TF32 nor sums of 16 bits nor split-K. Which
    tiles cuBLAS takes for a product still follows its size, and so the batch's.

    Args:
        wanted: false brings torch's settings back to what they were.
    """
    global _before
    if wanted and _before is None:
        _before = {flag: _read(flag) for flag in FLAGS}
        for flag, allowed in _before.items():
            setattr(MATMUL, flag, (False, False) if isinstance(allowed, tuple) else False)
    elif not wanted and _before is not None:
        for flag, allowed in _before.items():
            setattr(MATMUL, flag, allowed)
        _before = None


def _read(flag: str) -> Allowed:
    allowed: bool = getattr(MATMUL, flag)
    split: bool | None = getattr(MATMUL, f"{flag}_split_k", None)
    return allowed if split is None else (allowed, split)
