"""One layer's low-bit storage: its planes, their size in bytes, and decoding."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.engine.coding.formats import PlaneFormat
from kvbench.engine.coding.planes import Placement, count_rows
from kvbench.engine.layer import LayerState
from kvbench.kernels.layout import Layout, Past
from kvbench.kernels.planes import Plane, read_plane


@dataclass
class PackedStore(LayerState):
    """One layer's storage in planes, with the properties of `layer.LayerStore` that a view reads.

    Attributes:
        layout: layout of the layer's rows over the slots of all planes by position, without free slots.
        formats: number format of each plane.
        planes: stored values.
        placement: plane of each slot, and its index there.
        dtype: dtype of decoded keys and values.
        pending: keys and values [batch, rows, segment length, D] of a segment that is not full; None before its start.
        decoded: keys and values of all slots; None until they are read.
    """

    layout: Layout
    formats: tuple[PlaneFormat, ...]
    planes: tuple[Plane, ...]
    placement: Placement
    dtype: torch.dtype
    pending: tuple[Tensor, Tensor] | None = None
    decoded: Past | None = field(default=None, repr=False)

    @property
    def past(self) -> Past:
        """All keys and values, decoded, [batch, slots, D]; cached until the layer is stored again."""
        if self.decoded is None:
            self.decoded = self.read(range(len(self.planes[0].keys.data)))
        return self.decoded

    @property
    def keys(self) -> Tensor:
        """Keys of all planes in the order of slots, [batch, slots, D]."""
        return self.past.keys

    @property
    def values(self) -> Tensor:
        """Values of all planes in the order of slots, [batch, slots, D]."""
        return self.past.values

    @property
    def bytes(self) -> int:
        """Bytes of codes, scales and gains of all sequences, without static codebooks."""
        return sum(
            codes.data.nbytes
            + (0 if codes.affine is None or side.codec.scales is None else codes.affine.nbytes)
            + (0 if codes.gain is None else codes.gain.nbytes)
            for fmt, plane in zip(self.formats, self.planes, strict=True)
            for side, codes in ((fmt.keys, plane.keys), (fmt.values, plane.values))
        )

    @property
    def slot_bytes(self) -> int:
        """Bytes of one pending token's key and value, of all sequences."""
        batch, _, channels = self.planes[0].keys.data.shape
        return 2 * batch * channels * self.dtype.itemsize

    def count_sequence_bytes(self, heads: int, branches: int) -> list[int]:
        """Return the bytes of codes and scales of each sequence, or a single value common to all.

        Args:
            heads: KV heads of the layer.
            branches: sequences that share tokens stored once.
        """
        channels = self.planes[0].keys.data.shape[-1]
        return count_rows(count_row_bytes(self.formats, self.placement, channels, branches), heads)

    def count_read_bytes(self, heads: int) -> list[int]:
        """Return the bytes that attention to all slots of a sequence reads: codes, scales and indices.

        Shared tokens count for every sequence. The list has the length of `count_sequence_bytes`' list.
        """
        channels = self.planes[0].keys.data.shape[-1]
        rotates = any(plane.rotation is not None for plane in self.planes)
        return count_rows(count_row_bytes(self.formats, self.placement, channels, rotates=rotates), heads)

    def read(self, sequences: range) -> Past:
        """Decode keys and values of some sequences, [sequences, slots, D].

        The sequences either all store shared tokens or all read them.
        """
        first = self.planes[0].keys.data
        shape = (len(sequences), self.layout.total, first.shape[-1])
        keys, values = (first.new_empty(shape, dtype=self.dtype) for _ in range(2))
        for plane_rows, plane in zip(self.placement.planes, self.planes, strict=True):
            if plane_rows.layout.total:
                start = sequences.start % len(plane.keys.data)
                parts = read_plane(plane, slice(start, start + len(sequences)))
                for out, part in zip((keys, values), parts, strict=True):
                    out.index_copy_(1, plane_rows.slots, part.to(self.dtype))
        return Past(keys, values, self.layout)


def count_row_bytes(
    formats: Sequence[PlaneFormat],
    placement: Placement,
    channels: int,
    branches: int = 1,
    *,
    rotates: bool | None = None,
) -> list[int]:
    """Return the bytes of codes and scales of each row of a layer.

    Args:
        formats: number format of each plane.
        placement: plane of each slot, and its index there.
        channels: number of channels of a head.
        branches: sequences that share tokens stored once.
        rotates: whether attention rotates keys, to add the indices and positions that it reads; None adds none.
    """
    rows = [0] * len(placement.planes[0].layout.counts)
    for fmt, plane_rows in zip(formats, placement.planes, strict=True):
        token, block = fmt.count_token_bytes(channels), fmt.count_block_bytes(channels)
        token += 0 if rotates is None else fmt.count_index_bytes(rotates=rotates)
        readers = branches if fmt.shared else 1
        for row, (tokens, blocks) in enumerate(
            zip(plane_rows.layout.counts, plane_rows.entries, strict=True)
        ):
            rows[row] += (tokens * token + blocks * block) // readers
    return rows
