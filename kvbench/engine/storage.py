"""Base class of cache backends, PlainStorage and PackedStorage."""

from typing import Any

from torch import Tensor, dtype

from kvbench.core.segments import Segment
from kvbench.engine.schedule import Change, Schedule


class CacheBackend:
    """Keys and values of all layers; `store` is what `open` or `change` returned for a layer.

    Attributes:
        max_read_bytes: bytes of keys and values that were read back at a time since the last `prepare`.
    """

    max_read_bytes: int = 0

    def prepare(self, sequences: int, batch: int, rows: int, schedule: Schedule) -> None:
        """Prepare for a generation and drop whatever was held.

        Args:
            sequences: in the batch.
            batch: sequences that share a layout, 1 where each row has its own.
            rows: of a layout.
            schedule: of a static method, else empty.
        """
        raise NotImplementedError

    def find_free_slots(self, index: int) -> int:
        """Return the free slots that layouts have behind every row while segment `index` runs."""
        return 0

    def open(self, layer: int, free_slots: int = 0) -> Any:
        """Return a layer's storage that holds nothing yet, with so many free slots behind every row."""
        raise NotImplementedError

    def close(self, store: Any) -> None:
        """Take a layer's storage back."""
        raise NotImplementedError

    def release(self) -> None:
        """Free buffers beside the stores, until the next `prepare`."""

    def attend(self, store: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Attend over a layer's past and the whole present (`kernels.ragged_attention`)."""
        raise NotImplementedError

    def can_append(self, change: Change, dtype: dtype) -> bool:
        """Return whether past and present will lie together in the new storage as attention in `dtype` reads them."""
        return False

    def attend_step(self, store: Any, q: Tensor, k: Tensor, v: Tensor, length: int, filled: Tensor) -> Tensor:
        """Attend with the next tokens of a causal segment, and hold them until it is full.

        Args:
            store: a layer's, whose `filled` tokens of the segment came before.
            q: [batch, rows, queries, D].
            k: keys of the new tokens [batch, rows, tokens, D].
            v: values, shaped like k.
            length: tokens of the segment.
            filled: int64 [1], `store.filled` on the device.

        Returns:
            [batch, rows, queries, D].
        """
        raise NotImplementedError

    def fill(self, store: Any, k: Tensor, v: Tensor) -> None:
        """Hold all tokens of a causal segment, [batch, rows, tokens, D], to which nobody attends by `attend_step`."""
        raise NotImplementedError

    def view_flight(self, store: Any, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a full causal segment of `length` tokens, [batch, rows, tokens, D]."""
        raise NotImplementedError

    def change(
        self, layer: int, store: Any, present: tuple[Tensor, Tensor], at: Segment, change: Change
    ) -> Any:
        """Return a layer's storage after a segment; the old one is used up.

        Args:
            layer: its index.
            store: before.
            present: keys and values of the segment [batch, rows, tokens, D].
            at: the segment.
            change: what stays.
        """
        raise NotImplementedError

    def count_rebuild(self, before: int, after: int) -> int:
        """Return the most bytes of a layer while it changes, which has so many before and after."""
        raise NotImplementedError
