"""Float32 matrix products on a CPU by oneDNN, which uses the widest vectors on any processor."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

MIN_MULTIPLICATIONS = 1 << 21
"""Minimum multiplications at which oneDNN's products are faster despite the cost of a call."""
MATMUL_SETTINGS: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # the module is replaced by an object


@contextmanager
def onednn_products(multiplications: int, device: torch.device) -> Iterator[None]:
    """Use oneDNN for batched products on a CPU, if they are large and it computes them in full float32.

    torch uses oneDNN for float32 products only if bfloat16 arithmetic is permitted. A CPU without matrix units computes
    in float32 nevertheless, two to three times as fast as the default BLAS (docs/laboratory.md).
    If the CPU would use bfloat16, nothing is changed.
    """
    if device.type != "cpu" or multiplications < MIN_MULTIPLICATIONS or not _is_exact():
        yield
        return
    with _permit_bfloat16():
        yield


@contextmanager
def _permit_bfloat16() -> Iterator[None]:
    before = MATMUL_SETTINGS.fp32_precision
    MATMUL_SETTINGS.fp32_precision = "bf16"
    try:
        yield
    finally:
        MATMUL_SETTINGS.fp32_precision = before


@cache
def _is_exact() -> bool:
    """Return whether products stay exact with bfloat16 permitted: a product with the identity changes nothing."""
    values = torch.linspace(1, 2, 64 * 64).expand(2, -1).unflatten(1, (64, 64))
    with _permit_bfloat16():
        return torch.equal(values @ torch.eye(64).expand(2, -1, -1), values)
