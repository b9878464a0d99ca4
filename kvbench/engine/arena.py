"""One buffer for the keys and values of all layers, made once per batch size."""

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor


class Arena:
    """A ring that hands out storage and takes it back in the order in which it was taken.

    Layers are rebuilt one after another, keys before values, so that what was stored first is also released first: the
    ring needs no list of free places and never fragments. It holds whatever is alive at once plus one block, which is
    what may stay free before the end of the buffer when a block starts over at its beginning (`ring_slots`). A block
    that does not fit is allocated by itself.

    Args:
        numbers: size of the buffer in numbers of `dtype`.
        dtype: of the numbers.
        device: where they live.
    """

    def __init__(self, numbers: int, dtype: torch.dtype, device: torch.device) -> None:
        # An ordinary tensor may be written both inside and outside of inference mode.
        with torch.inference_mode(mode=False):
            self._buffer = torch.empty(numbers, dtype=dtype, device=device)
        self.clear()

    @property
    def numbers(self) -> int:
        """Size of the buffer."""
        return len(self._buffer)

    def clear(self) -> None:
        """Take everything back."""
        self._alive: dict[int, tuple[int, int]] = {}  # start and stop by ticket, oldest first
        self._tickets = 0

    def save(self) -> Callable[[], None]:
        """Note what is handed out, and return what brings that back."""
        alive, tickets = dict(self._alive), self._tickets

        def restore() -> None:
            self._alive, self._tickets = dict(alive), tickets

        return restore

    def take(self, shape: Sequence[int]) -> tuple[Tensor, int | None]:
        """Return an uninitialised contiguous tensor, and the ticket to release it with (None: it has none)."""
        count = torch.Size(shape).numel()
        start = self._find(count) if count else None
        if start is None:
            return self._buffer.new_empty(shape), None
        self._tickets += 1
        self._alive[self._tickets] = (start, start + count)
        return self._buffer[start : start + count].view(shape), self._tickets

    def fits(self, count: int) -> bool:
        """Return whether so many numbers, taken one after the other, would all lie in the ring."""
        return self._find(count) is not None

    def release(self, ticket: int | None) -> None:
        """Take one block back."""
        if ticket is not None:
            del self._alive[ticket]

    def _find(self, count: int) -> int | None:
        if not self._alive:
            return 0 if count <= self.numbers else None
        oldest, _ = self._alive[next(iter(self._alive))]
        newest, stop = self._alive[next(reversed(self._alive))]
        if newest < oldest:  # the newest blocks started over
            return stop if stop + count <= oldest else None
        if stop + count <= self.numbers:
            return stop
        return 0 if count <= oldest else None


def ring_slots(blocks: Sequence[Sequence[int]]) -> int:
    """Return how many slots a ring needs for a generation: the most that is alive at once, and the largest block.

    Args:
        blocks: slots of each layer's keys (and of its values) after each segment, [segments][layers]. A layer's old
            keys are released once the new ones are made, then its values follow.
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
