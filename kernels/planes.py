"""Storage in few bits: a plane holds the keys and values of one layer's slots that are stored in one form.

A layer may have several planes, each with rows of its own (`kernels/layout.py`): attention over a set of tokens does
not depend on their order, so that shares are attended to one after the other and merged, or read back into one buffer.

Keys are quantised without the rotation of the model, and rotated again when they are read: channels
vary less among tokens before the rotation. Unrotated keys lie with the even channels first, then the odd ones, so that
both parts of the pairs that turn together are tiles of neighbouring channels.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.layout import Layout
from kvbench.kernels.quantise import (
    decode_affine,
    decode_book,
    encode_affine,
    encode_book,
    fit_affine,
    pack,
    unpack,
)


class Codes(NamedTuple):
    """Keys or values of a plane's slots, and what they stand for.

    At most one of `affine` and `book` is given; without either `numbers` are the numbers themselves, in 16 bits or fp8.

    Attributes:
        numbers: uint8 [batch, slots, D bits / 8] (`quantise.pack`), or [batch, slots, D] of a floating dtype.
        affine: float16 [batch, entries, channels, 2], scale and zero; channels is D, or 1 where all share them. Entry
            `entry[x]` belongs to slot x, entry x itself where no entries are given. A batch of 1 is for all sequences.
        book: float16 [entries, D, 2^bits], levels in ascending order; entry `entry[x]` belongs to slot x.
        entry: int32 [slots], see above.
    """

    numbers: Tensor
    affine: Tensor | None = None
    book: Tensor | None = None
    entry: Tensor | None = None


class Plane(NamedTuple):
    """The slots of a layer that are stored in one form.

    Attributes:
        layout: where rows lie; there are no free slots behind them.
        bits: of a number: 16, 8, 4, 3 or 2.
        keys: of each slot; unrotated and even channels first if there is a rotation.
        values: of each slot, as they are.
        positions: int64 [slots], position of each slot's token.
        rotation: complex64 or complex32 [positions, D/2], what neighbouring channels of a key are multiplied by at each
            position; None where keys are stored as attention reads them.
    """

    layout: Layout
    bits: int
    keys: Codes
    values: Codes
    positions: Tensor
    rotation: Tensor | None = None


def list_slots(layout: Layout) -> tuple[Tensor, Tensor]:
    """Return row and position of every slot of a flat buffer without free slots, int64 [slots] each."""
    lengths = layout.lengths.index_select(0, layout.order)
    rows = layout.order.long().repeat_interleave(lengths, output_size=layout.total)
    place = torch.arange(layout.total, device=rows.device) - layout.offsets[rows]
    return rows, layout.positions[rows, place]


def unrotate(keys: Tensor, rotation: Tensor) -> Tensor:
    """Undo the rotation of keys [..., slots, D] by complex64 [slots, D/2]: float32, even channels first, then odd."""
    even, odd = keys.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotation.real, rotation.imag
    return torch.cat((even * cos + odd * sin, odd * cos - even * sin), -1)


def rotate(keys: Tensor, rotation: Tensor) -> Tensor:
    """Turn stored keys float32 [..., slots, D] by complex64 [slots, D/2]; pairs are neighbours again.

    A key is rotated to the same bits wherever it lies, as products of complex tensors do not promise.
    """
    even, odd = keys.chunk(2, -1)
    cos, sin = rotation.real.contiguous(), rotation.imag.contiguous()
    rotated = even.new_empty(*even.shape, 2)
    rotated[..., 0] = (even * cos).sub_(odd * sin)
    rotated[..., 1] = (even * sin).add_(odd * cos)
    return rotated.flatten(-2)


def encode_tokens(x: Tensor, bits: int) -> Codes:
    """Encode numbers [batch, slots, D] on a scale of each slot."""
    affine = fit_affine(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), bits)
    return Codes(pack(encode_affine(x, affine, bits), bits), affine)


def encode_channels(x: Tensor, exists: Tensor, edges: Sequence[int], bits: int) -> Codes:
    """Encode numbers [batch, rows, tokens, D] on a scale of each row's and block's channels.

    Args:
        x: the numbers.
        exists: bool [rows, tokens], those that scales must reach; codes of others mean nothing.
        edges: tokens at which blocks begin, ascending from 0, and the one after the last of them.
        bits: of a code.

    Returns:
        Codes of rows x tokens slots; scales of rows x blocks entries, without saying which is whose.
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


def encode_levels(x: Tensor, table: Tensor, bits: int) -> Tensor:
    """Encode numbers [batch, rows, tokens, D] by a static table of each row.

    Args:
        x: the numbers.
        table: levels [rows, D, 2^bits] of codebooks, or scale and zero [rows, D, 2].
        bits: of a code.

    Returns:
        Packed codes uint8 [batch, rows x tokens, D bits / 8].
    """
    affine = table.shape[-1] == 2
    codes = encode_affine(x, table[:, None], bits) if affine else encode_book(x, table)
    return pack(codes.flatten(1, 2), bits)


def halve(rotation: Tensor) -> Tensor:
    """Return a rotation in complex32: kernels that read codes of few bits would else read more of it than of them."""
    return torch.view_as_complex(torch.view_as_real(rotation).half())


def decode(codes: Codes, bits: int, sequences: slice = slice(None), slots: slice = slice(None)) -> Tensor:
    """Return the numbers [sequences, slots, D] that codes stand for: float32, or as they are stored."""
    numbers = codes.numbers[sequences, slots]
    if codes.affine is not None:
        affine = codes.affine if len(codes.affine) == 1 else codes.affine[sequences]
        if codes.entry is None:
            affine = affine[:, slots]
        else:  # scales apart from zeros: vectors of neighbours
            apart = affine.float().movedim(-1, 0).contiguous()
            affine = apart.index_select(2, codes.entry[slots]).movedim(0, -1)
        return decode_affine(unpack(numbers, bits), affine)
    if codes.book is not None:
        assert codes.entry is not None
        return decode_book(unpack(numbers, bits), codes.book, codes.entry[slots])
    return numbers.float() if numbers.element_size() == 1 else numbers


def read_plane(
    plane: Plane, sequences: slice = slice(None), slots: slice = slice(None)
) -> tuple[Tensor, Tensor]:
    """Return keys and values of a plane's slots as attention reads them, [sequences, slots, D]: float32, or as stored.

    Args:
        plane: what is stored.
        sequences: those of the batch that are wanted.
        slots: those of the flat buffer that are wanted.
    """
    keys, values = (decode(codes, plane.bits, sequences, slots) for codes in (plane.keys, plane.values))
    if plane.rotation is not None:
        parts = torch.view_as_real(plane.rotation).index_select(0, plane.positions[slots])
        keys = rotate(keys.float(), torch.view_as_complex(parts.float()))
    return keys, values
