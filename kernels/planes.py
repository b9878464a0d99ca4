"""Storage in few bits: a plane holds the keys and values of one layer's slots that are stored in one form.

A layer may have several planes, each with rows of its own (`kernels/layout.py`): attention over a set of tokens does
not depend on their order, so that shares are attended to one after the other and merged, or read back into one buffer.

Keys are turned back by the model's rotation before they are quantised, and turned again when they are read: channels
vary less among tokens before they are turned. Turned keys lie with the even channels first, then the odd ones, so that
both parts of the pairs that turn together are tiles of neighbouring channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.layout import Layout
from kvbench.kernels.quantise import decode_affine, decode_book, unpack


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
        layout: where rows lie; there is no room behind them.
        bits: of a number: 16, 8, 4, 3 or 2.
        keys: of each slot; turned back and even channels first if there is a rotation.
        values: of each slot, as they are.
        positions: int64 [slots], position of each slot's token.
        rotation: complex64 [positions, D/2], what neighbouring channels of a key are multiplied by at each position;
            None where keys are stored as attention reads them.
    """

    layout: Layout
    bits: int
    keys: Codes
    values: Codes
    positions: Tensor
    rotation: Tensor | None = None


def list_slots(layout: Layout) -> Tensor:
    """Return the position of every slot of a flat buffer without room, int64 [slots]."""
    rows = layout.positions.index_select(0, layout.order)
    parts, first = [rows.new_empty(0)], 0
    for group in layout.groups:
        parts.append(rows[first : first + group.size, : group.length].flatten())
        first += group.size
    return torch.cat(parts)


def turn_back(keys: Tensor, rotation: Tensor) -> Tensor:
    """Undo the rotation of keys [..., slots, D] by complex64 [slots, D/2]: float32, even channels first, then odd."""
    pairs = torch.view_as_complex(keys.float().unflatten(-1, (-1, 2)).contiguous()) * rotation.conj()
    return torch.cat((pairs.real, pairs.imag), -1)


def turn(keys: Tensor, rotation: Tensor) -> Tensor:
    """Turn stored keys float32 [..., slots, D] by complex64 [slots, D/2]; pairs are neighbours again."""
    even, odd = keys.chunk(2, -1)
    return torch.view_as_real(torch.complex(even, odd) * rotation).flatten(-2)


def decode(codes: Codes, bits: int, sequences: slice = slice(None), slots: slice = slice(None)) -> Tensor:
    """Return the numbers [sequences, slots, D] that codes stand for: float32, or as they are stored."""
    numbers = codes.numbers[sequences, slots]
    if codes.affine is not None:
        affine = codes.affine if len(codes.affine) == 1 else codes.affine[sequences]
        affine = affine[:, slots] if codes.entry is None else affine.index_select(1, codes.entry[slots])
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
        keys = turn(keys.float(), plane.rotation.index_select(0, plane.positions[slots]))
    return keys, values
