"""Planes of random codes, as a cache with low-bit storage holds them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.layout import Layout, arrange_rows
from kvbench.kernels.planes import Codes, Plane, list_slots, to_complex32


class Stored(NamedTuple):
    """Bits of an element; for keys and for values `channel` or `token` (which share a scale), `codebook` or `fp8`."""

    bits: int
    keys: str
    values: str

    @property
    def name(self) -> str:
        """Name of the storage in tables."""
        return f"float{self.bits}" if self.keys == "fp8" else f"int{self.bits}, {self.keys}"


def arrange_lengths(lengths: Sequence[int], device: str = "cpu", free_slots: int = 0) -> Layout:
    """Return the layout of rows that each hold the first `lengths[row]` tokens, with `free_slots` after each."""
    counts = [int(length) for length in lengths]
    slots = torch.arange(max(counts)).expand(len(counts), -1)
    positions = slots.where(slots < torch.tensor(counts)[:, None], -1)
    return arrange_rows(positions.to(device), counts, free_slots)


def make_plane(form: Stored, layout: Layout, batch: int, channels: int, *, block: int) -> Plane:
    """Return a plane of random codes, with rows of equal length and the rotation of keys in 16 bits.

    Each `block` tokens of a row share a channel's scale or a codebook. Keys are stored without their rotation.
    """
    rows, length = len(layout.counts), layout.longest
    blocks = -(-length // block)
    entry = (torch.arange(rows)[:, None] * blocks + torch.arange(length) // block).flatten().int()

    def make_codes(scheme: str) -> Codes:
        if scheme == "fp8":
            return Codes(torch.randn(batch, layout.total, channels).to(torch.float8_e4m3fn))
        data = torch.randint(256, (batch, layout.total, channels * form.bits // 8)).byte()
        if scheme == "codebook":
            codebook = torch.randn(rows * blocks, channels, 1 << form.bits).sort(-1).values
            return Codes(data, codebook=codebook.half(), entry=entry)
        sizes = (layout.total, 1) if scheme == "token" else (rows * blocks, channels)
        affine = torch.randn(batch, *sizes, 2).mul_(2 / (1 << form.bits)).half()
        return Codes(data, affine=affine, entry=None if scheme == "token" else entry)

    rotation = to_complex32(make_rotation(length, channels))
    codes = make_codes(form.keys), make_codes(form.values)
    return Plane(layout, form.bits, form.bits, *codes, list_slots(layout)[1], rotation)


def make_rotation(positions: int, channels: int) -> Tensor:
    """Return one-dimensional rotations complex64 [positions, D/2] with base 10 000."""
    angles = torch.arange(positions)[:, None] * 10_000.0 ** (-torch.arange(0, channels, 2) / channels)
    return torch.polar(torch.ones_like(angles), angles)
