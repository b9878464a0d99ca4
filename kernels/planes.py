"""Low-bit storage: a plane stores the keys and values of those slots of a layer that share one format.

A layer may have several planes, each with its own rows (`kernels/layout.py`). Attention does not depend on the order of
tokens, so planes are read one after the other and merged, or decoded into one buffer.

Keys are quantised without the rotation of the model and rotated when they are read: before rotation, channels vary less
between tokens. Unrotated keys store even channels first, then odd ones, so that the two parts of rotated pairs are
tiles of adjacent channels.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.hadamard import rotate_channels
from kvbench.kernels.layout import Layout
from kvbench.kernels.quantise import (
    decode_affine,
    decode_codebook,
    encode_affine,
    fit_affine,
    pack,
    unpack,
)


class Codes(NamedTuple):
    """Encoded keys or values of a plane's slots.

    At most one of `affine` and `codebook` is set; without either, `data` has the values in 16 bits or float8.
    With `gain`, codes are of vectors rotated by `hadamard.rotate_channels`.

    Attributes:
        data: uint8 [batch, slots, D bits / 8] (`quantise.pack`), or [batch, slots, D] of a floating dtype.
        affine: float16 [batch, entries, channels, 2], scale and zero; channels is D, or 1 if channels share them.
            Slot x uses entry `entry[x]`, or entry x without `entry`. A batch of 1 serves all sequences.
        codebook: float16 [entries, D, 2^bits], ascending levels; slot x uses entry `entry[x]`. With `gain`, float32
            [2^bits] for all slots and channels.
        entry: int32 [slots].
        gain: float16 [batch, slots], factor on the levels of a slot.
    """

    data: Tensor
    affine: Tensor | None = None
    codebook: Tensor | None = None
    entry: Tensor | None = None
    gain: Tensor | None = None


class Plane(NamedTuple):
    """Slots of a layer that are stored in one format.

    Attributes:
        layout: layout without free slots.
        key_bits: bits of a key's element: 16, 8, 4, 3 or 2.
        value_bits: bits of a value's element, likewise.
        keys: key of each slot; with a rotation, unrotated and even channels first.
        values: value of each slot.
        positions: int64 [slots], position of each slot's token.
        rotation: complex64 or complex32 [positions, D/2], factor on pairs of adjacent channels of a key at each
            position; None if keys are stored rotated.
    """

    layout: Layout
    key_bits: int
    value_bits: int
    keys: Codes
    values: Codes
    positions: Tensor
    rotation: Tensor | None = None


def list_slots(layout: Layout) -> tuple[Tensor, Tensor]:
    """Return row and position of every slot of a flat buffer without free slots, int64 [slots] each."""
    lengths = layout.lengths.index_select(0, layout.order)
    rows = layout.order.long().repeat_interleave(lengths, output_size=layout.total)
    index = torch.arange(layout.total, device=rows.device) - layout.offsets[rows]
    return rows, layout.positions[rows, index]


def unrotate(keys: Tensor, rotation: Tensor) -> Tensor:
    """Undo the rotation of keys [..., slots, D] by complex64 [slots, D/2]: float32, even channels first, then odd."""
    even, odd = keys.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotation.real, rotation.imag
    return torch.cat((even * cos + odd * sin, odd * cos - even * sin), -1)


def rotate(keys: Tensor, rotation: Tensor) -> Tensor:
    """Rotate stored keys float32 [..., slots, D] by complex64 [slots, D/2] and interleave even and odd channels.

    A key gets the same bits in every slot, which products of complex tensors do not guarantee.
    """
    even, odd = keys.chunk(2, -1)
    cos, sin = rotation.real.contiguous(), rotation.imag.contiguous()
    rotated = even.new_empty(*even.shape, 2)
    rotated[..., 0] = (even * cos).sub_(odd * sin)
    rotated[..., 1] = (even * sin).add_(odd * cos)
    return rotated.flatten(-2)


def encode_tokens(x: Tensor, bits: int) -> Codes:
    """Encode keys or values [batch, slots, D] with one scale per slot."""
    affine = fit_affine(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), bits)
    return Codes(pack(encode_affine(x, affine, bits), bits), affine)


def encode_channels(x: Tensor, exists: Tensor, edges: Sequence[int], bits: int) -> Codes:
    """Encode keys or values [batch, rows, tokens, D] with one scale per row, block and channel.

    Args:
        x: keys or values.
        exists: bool [rows, tokens], tokens that scales must cover; codes of other tokens are arbitrary.
        edges: first token of each block, ascending from 0, followed by the number of tokens.
        bits: bits of a code.

    Returns:
        Codes of rows x tokens slots and scales of rows x blocks entries, without `entry`.
    """
    blocks = list(pairwise(edges))
    x, absent = x.float(), ~exists[..., None]
    above, below = x.masked_fill(absent, torch.inf), x.masked_fill(absent, -torch.inf)
    smallest = torch.stack([above[:, :, start:stop].amin(2) for start, stop in blocks], 2)
    largest = torch.stack([below[:, :, start:stop].amax(2) for start, stop in blocks], 2)
    affine = fit_affine(smallest, largest, bits)
    codes = [
        encode_affine(x[:, :, start:stop], affine[:, :, number, None], bits)
        for number, (start, stop) in enumerate(blocks)
    ]
    return Codes(pack(torch.cat(codes, 2).flatten(1, 2), bits), affine.flatten(1, 2))


def to_complex32(rotation: Tensor) -> Tensor:
    """Return a rotation in complex32; in complex64 kernels would read more bytes of rotation than of low-bit codes."""
    return torch.view_as_complex(torch.view_as_real(rotation).half())


def decode(codes: Codes, bits: int, sequences: slice = slice(None)) -> Tensor:
    """Decode keys or values [sequences, slots, D] to float32 or the stored dtype; rotated vectors stay rotated."""
    data = codes.data[sequences]
    if codes.gain is not None:
        assert codes.codebook is not None
        return codes.codebook[unpack(data, bits).int()] * codes.gain[sequences, :, None].float()
    if codes.affine is not None:
        affine = codes.affine if len(codes.affine) == 1 else codes.affine[sequences]
        if codes.entry is not None:  # scales and zeros apart, so that gathers read contiguous vectors
            scales_zeros = affine.float().movedim(-1, 0).contiguous()
            affine = scales_zeros.index_select(2, codes.entry).movedim(0, -1)
        return decode_affine(unpack(data, bits), affine)
    if codes.codebook is not None:
        assert codes.entry is not None
        return decode_codebook(unpack(data, bits), codes.codebook, codes.entry)
    return data.float() if data.element_size() == 1 else data


def read_plane(plane: Plane, sequences: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Return keys, with the model's rotation, and values of a plane's slots: float32, or the stored dtype.

    Args:
        plane: stored keys and values.
        sequences: sequences of the batch to read.

    Returns:
        Both [sequences, slots, D]; vectors with a gain are rotated back.
    """
    keys, values = (
        x if codes.gain is None else rotate_channels(x)
        for x, codes in zip(read_stored(plane, sequences), (plane.keys, plane.values), strict=True)
    )
    return keys, values


def read_stored(plane: Plane, sequences: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Return keys and values like `read_plane`, but leave vectors with a gain in rotated channels."""
    keys = decode(plane.keys, plane.key_bits, sequences)
    values = decode(plane.values, plane.value_bits, sequences)
    if plane.rotation is not None:
        parts = torch.view_as_real(plane.rotation).index_select(0, plane.positions)
        keys = rotate(keys.float(), torch.view_as_complex(parts.float()))
    return keys, values
