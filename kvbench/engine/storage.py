"""Base class of the cache backends `PlainStorage` and `PackedStorage`."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, dtype

from kvbench.core.segments import Segment
from kvbench.engine.schedule import Schedule, StorageChange


class CacheBackend:
    """Base class: keys and values of all layers. `store` is a layer's result of `allocate_layer` or `change`.

    Queries are [S, H, Q, D], keys and values of the segment [S, H, T, D] (`engine/layer.py`).

    Attributes:
        max_read_bytes: maximum bytes of keys and values decoded at once since the last `prepare`.
    """

    max_read_bytes: int = 0

    def prepare(self, sequences: int, batch: int, rows: int, schedule: Schedule) -> None:
        """Prepare for a generation and drop all contents.

        Args:
            sequences: number of sequences in the batch.
            batch: sequences that share a layout, 1 if each row has its own.
            rows: rows of a layout.
            schedule: schedule of a static method; otherwise empty.
        """
        raise NotImplementedError

    def find_free_slots(self, index: int) -> int:
        """Return the number of free slots behind each row of a layout while segment `index` runs."""
        return 0

    def allocate_layer(self, layer: int, free_slots: int = 0) -> Any:
        """Return empty storage of a layer, with `free_slots` behind each row."""
        raise NotImplementedError

    def free_layer(self, store: Any) -> None:
        """Release the storage of a layer."""
        raise NotImplementedError

    def release(self) -> None:
        """Free buffers outside the stores, until the next `prepare`."""

    def attend(self, store: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return output and log-sum-exp of attention over past and whole present (`kernels.ragged_attention`)."""
        raise NotImplementedError

    def can_append(self, change: StorageChange, dtype: dtype) -> bool:
        """Return whether the new storage will hold past and present together, in the `dtype` of attention."""
        return False

    def attend_appended(self, store: Any, q: Tensor) -> Tensor:
        """Attend over new storage that holds past and present together; requires `can_append`."""
        raise NotImplementedError

    def attend_step(self, store: Any, q: Tensor, k: Tensor, v: Tensor, length: int, filled: Tensor) -> Tensor:
        """Attend with the next tokens of a causal segment, and keep them until the segment is full.

        Args:
            store: storage of a layer; it has `store.filled` earlier tokens of the segment.
            q: queries of the new tokens.
            k: keys of the new tokens.
            v: values of the new tokens.
            length: tokens of the segment.
            filled: int64 [1], `store.filled` on the device.

        Returns:
            The output, shaped like q.
        """
        raise NotImplementedError

    def locate_rows(self, stores: Sequence[Any], filled: Tensor) -> bool:
        """Write the offsets of all layers' rows into tensors with fixed addresses.

        Args:
            stores: storage of all layers at the beginning of a causal segment.
            filled: int64 [1], tokens of the segment before a step.

        Returns:
            Whether recorded steps can use these tensors for all rows.
        """
        return False

    def fill(self, store: Any, k: Tensor, v: Tensor) -> None:
        """Store all tokens of a causal segment at once, without `attend_step`."""
        raise NotImplementedError

    def view_pending(self, store: Any, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a full causal segment of `length` tokens, [S, H, length, D]."""
        raise NotImplementedError

    def change(
        self, layer: int, store: Any, present: tuple[Tensor, Tensor], segment: Segment, change: StorageChange
    ) -> Any:
        """Return a layer's storage after a segment; the old storage is consumed.

        Args:
            layer: its index.
            store: storage before the segment is stored.
            present: keys and values of the segment.
            segment: the segment.
            change: the new layout and its sources.
        """
        raise NotImplementedError

    def find_rebuild_peak(self, before: int, after: int) -> int:
        """Return the peak bytes of a layer during a rebuild.

        Args:
            before: bytes of the layer before it.
            after: bytes of the layer after it.
        """
        raise NotImplementedError
