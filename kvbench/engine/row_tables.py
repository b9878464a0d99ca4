"""Offsets of all layers' rows in the ring buffer, in tensors with fixed addresses."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.engine.arena import Arena
from kvbench.engine.layer import LayerStore
from kvbench.kernels.layout import RowOffsets, locate_rows


class RowTables:
    """Offsets, lengths and order of rows for the one-token kernel, tables with one row per layer.

    Args:
        layers: number of layers of the model.
        rows: number of rows of each layer's layout.
        longest: maximum slots of a row, see `RowOffsets`.
        device: device of the tables.
    """

    def __init__(self, layers: int, rows: int, longest: int, device: torch.device) -> None:
        self._longest = longest
        # Ordinary tensors may be written inside and outside of inference mode.
        with torch.inference_mode(mode=False):
            offsets = torch.zeros(2, layers, rows, dtype=torch.int64, device=device)
            lengths = torch.zeros(2, layers, rows, dtype=torch.int32, device=device)
            self._starts = torch.zeros(layers, 3, dtype=torch.int64, device=device)
        (self._key_offsets, self._value_offsets), (self._lengths, self._order) = offsets, lengths

    def update(self, stores: Sequence[LayerStore], arena: Arena, filled: Tensor) -> bool:
        """Write the layers' offsets into the tables, and set `store.placed` to their rows of the tables.

        Storage outside the ring gets offsets of its own instead.

        Args:
            stores: storage of all layers.
            arena: ring buffer of keys and values.
            filled: int64 [1], tokens of the segment before the step.

        Returns:
            Whether all storage is in the ring, so that a recorded step finds it.
        """
        starts = torch.tensor([_find_starts(store) for store in stores])
        self._starts.copy_(starts, non_blocking=True)  # from pageable memory it does not wait for the device
        layouts = [store.layout for store in stores]
        torch.stack([layout.offsets for layout in layouts], out=self._value_offsets)
        torch.stack([layout.lengths for layout in layouts], out=self._lengths)
        torch.stack([layout.order for layout in layouts], out=self._order)
        torch.add(self._value_offsets, self._starts[:, :1], out=self._key_offsets)
        self._value_offsets.add_(self._starts[:, 1:2])
        all_inside = True
        for layer, store in enumerate(stores):
            if None in store.handles:
                store.placed, all_inside = locate_rows(store.past, filled), False
            else:
                store.placed = self._view(layer, arena.buffer, filled)
        return all_inside

    def _view(self, layer: int, ring: Tensor, filled: Tensor) -> RowOffsets:
        return RowOffsets(
            ring,
            ring,
            self._key_offsets[layer],
            self._value_offsets[layer],
            self._lengths[layer],
            self._order[layer],
            self._starts[layer, 2:],
            filled,
            self._longest,
        )


def _find_starts(store: LayerStore) -> tuple[int, int, int]:
    """Return the first slot of keys and of values in their buffer, and the slots of a sequence."""
    keys, values = store.keys, store.values
    channels = keys.shape[2]
    return int(keys.storage_offset()) // channels, int(values.storage_offset()) // channels, keys.shape[1]
