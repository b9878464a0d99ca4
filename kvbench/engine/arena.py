"""Ring buffer for the keys and values of all layers, allocated once per batch size."""

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor


class Arena:
    """Ring buffer whose blocks are released in the order in which they were taken.

    Layers are rebuilt one after another, keys before values, so that the oldest block is released first: the ring needs
    no free list and never fragments. Its size is the largest total of live blocks plus one block, which may
    stay unused at the end of the buffer when a block starts at the beginning again (`ring_slots`). A block that does
    not fit is allocated separately.

    Attributes:
        buffer: elements of all blocks, [elements].

    Args:
        size: size of the buffer in elements.
        dtype: dtype of the elements.
        device: device of the buffer.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        # An ordinary tensor may be written inside and outside of inference mode.
        with torch.inference_mode(mode=False):
            self.buffer = torch.empty(size, dtype=dtype, device=device)
        self.clear()

    @property
    def size(self) -> int:
        """Size of the buffer in elements."""
        return len(self.buffer)

    def clear(self) -> None:
        """Release all blocks of the ring."""
        self._alive: dict[int, tuple[int, int]] = {}  # start and stop by handle, oldest first
        self._handles = 0

    def save(self) -> Callable[[], None]:
        """Return a function that restores the blocks that are live now."""
        alive, handles = dict(self._alive), self._handles

        def restore() -> None:
            self._alive, self._handles = dict(alive), handles

        return restore

    def take(self, shape: Sequence[int]) -> tuple[Tensor, int | None]:
        """Return an uninitialised contiguous tensor, and its handle for `release`; None if it is outside the ring."""
        count = torch.Size(shape).numel()
        start = self._find(count) if count else None
        if start is None:
            return self.buffer.new_empty(shape), None
        self._handles += 1
        self._alive[self._handles] = (start, start + count)
        return self.buffer[start : start + count].view(shape), self._handles

    def fits(self, count: int) -> bool:
        """Return whether blocks of `count` elements in total fit the ring."""
        return self._find(count) is not None

    def release(self, handle: int | None) -> None:
        """Release one block by its handle; None does nothing."""
        if handle is not None:
            del self._alive[handle]

    def _find(self, count: int) -> int | None:
        if not self._alive:
            return 0 if count <= self.size else None
        oldest, _ = self._alive[next(iter(self._alive))]
        newest, stop = self._alive[next(reversed(self._alive))]
        if newest < oldest:  # the newest blocks started at the beginning again
            return stop if stop + count <= oldest else None
        if stop + count <= self.size:
            return stop
        return 0 if count <= oldest else None


def ring_slots(blocks: Sequence[Sequence[int]]) -> int:
    """Return the slots of a ring for a generation: the largest total of live blocks plus the largest block.

    Args:
        blocks: slots of each layer's keys (and of its values) after each segment, [segments][layers]. A layer's old
            keys are released once the new keys exist, then its values follow.
    """
    held = [0] * len(blocks[0]) if blocks else []
    alive = peak = 0
    for layers in blocks:
        for layer, slots in enumerate(layers):
            for _ in ("keys", "values"):
                peak = max(peak, alive + slots)
                alive += slots - held[layer]
            held[layer] = slots
    return peak + max(chain.from_iterable(blocks), default=0)
