"""Planes of random codes in all storage formats of a cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.hadamard import list_levels
from kvbench.kernels.layout import Layout, arrange_rows
from kvbench.kernels.planes import Codes, Plane, list_slots


class Stored(NamedTuple):
    """Bits of a number; `channel` or `token` (share a scale), `codebook`, `rotated`, `fp8` or `plain` for each side."""

    bits: int
    keys: str
    values: str

    @property
    def name(self) -> str:
        """Name in tables."""
        if self.keys in ("plain", "fp8"):
            return f"float{self.bits}"
        return f"int{self.bits}, {self.keys}"


PLAIN = Stored(32, "plain", "plain")
FORMS = (
    *(Stored(bits, "channel", "token") for bits in (8, 4, 3, 2)),
    *(Stored(bits, "token", "token") for bits in (8, 4)),
    *(Stored(bits, "codebook", "codebook") for bits in (4, 3, 2)),
    Stored(8, "fp8", "fp8"),
    Stored(4, "rotated", "rotated"),
)
"""Formats of `conf/storage` and of `cache_dtype`."""


def equal_rows(rows: int, length: int) -> Layout:
    """Return the layout of rows with the first `length` tokens."""
    return arrange_rows(torch.arange(length).expand(rows, -1), [length] * rows)


def make_plane(
    form: Stored, layout: Layout, batch: int, channels: int, *, block: int, rotated: bool
) -> Plane:
    """Return a plane of random codes, with rows of equal length.

    Each `block` tokens of a row share a channel's scale or a codebook. If `rotated`, the model rotates keys, and all
    but `plain` and `rotated` ones are stored without that rotation.
    """
    rows, length = len(layout.counts), layout.longest
    blocks = -(-length // block)
    entry = (torch.arange(rows)[:, None] * blocks + torch.arange(length) // block).flatten().int()

    def make_codes(scheme: str) -> Codes:
        if scheme == "plain":
            dtype = torch.float32 if form.bits == 32 else torch.float16
            return Codes(torch.randn(batch, layout.total, channels, dtype=dtype))
        if scheme == "fp8":
            return Codes(torch.randn(batch, layout.total, channels).to(torch.float8_e4m3fn))
        numbers = torch.randint(256, (batch, layout.total, channels * form.bits // 8)).byte()
        if scheme == "rotated":
            return Codes(numbers, book=list_levels(form.bits), gain=torch.rand(batch, layout.total).half())
        if scheme == "codebook":
            book = torch.randn(rows * blocks, channels, 1 << form.bits).sort(-1).values
            return Codes(numbers, book=book.half(), entry=entry)
        sizes = (layout.total, 1) if scheme == "token" else (rows * blocks, channels)
        affine = torch.randn(batch, *sizes, 2).mul_(2 / (1 << form.bits)).half()
        return Codes(numbers, affine=affine, entry=None if scheme == "token" else entry)

    unrotated = rotated and form.keys not in ("plain", "rotated")
    rotation = make_rotation(length, channels) if unrotated else None
    codes = make_codes(form.keys), make_codes(form.values)
    bits = min(form.bits, 16)
    return Plane(layout, bits, bits, *codes, list_slots(layout)[1], rotation)


def make_rotation(positions: int, channels: int) -> Tensor:
    """Return one-dimensional rotations complex64 [positions, D/2] with base 10 000."""
    angles = torch.arange(positions)[:, None] * 10_000.0 ** (-torch.arange(0, channels, 2) / channels)
    return torch.polar(torch.ones_like(angles), angles)
