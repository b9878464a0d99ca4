"""A simulation of torch's CUDA caching allocator: how much it reserves for a given order of allocations and frees.

It follows c10/cuda/CUDACachingAllocator.cpp at its default settings, on one stream and with as much memory as is asked
for, so that no segment is ever given back: sizes in multiples of 512 bytes, one pool for blocks of at most 1 MiB and
one for larger ones, best fit, splitting, merging of free neighbours. With `expandable` it follows
`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`: each pool is one segment that grows at its end by whole pages.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

MIB = 1 << 20
UNIT = 512
"""Sizes of blocks are multiples of so many bytes."""
SMALL = MIB
"""Bytes of the largest block of the small pool."""
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
"""Bytes of a segment, or of a page of an expandable one, in the small and in the large pool."""
OWN_SEGMENT, OWN_UNIT = 10 * MIB, 2 * MIB
"""Blocks from so many bytes on get a segment of their own size, a multiple of so many bytes."""


class Event(NamedTuple):
    """An allocation of `size` bytes under a number of its own, or, where `size` is None, its end."""

    number: int
    size: int | None


class Peaks(NamedTuple):
    """The most bytes that were in use, and the most that were reserved, at any time of a replay."""

    allocated: int
    reserved: int

    @property
    def ratio(self) -> float:
        """Bytes reserved per byte in use."""
        return self.reserved / self.allocated


@dataclass(eq=False)
class Block:
    """A stretch of a segment, between its neighbours there; in use unless it is in its pool's `free`."""

    pool: "Pool"
    address: int
    size: int
    before: "Block | None" = None
    after: "Block | None" = None
    free: bool = False


class Pool:
    """Free blocks by size, and the segments they were cut from.

    Attributes:
        small: whether blocks of at most `SMALL` bytes live here.
        reserved: bytes of all segments.
    """

    def __init__(self, *, small: bool, expandable: bool) -> None:
        self.small, self.reserved = small, 0
        self._expandable = expandable
        self._free: list[tuple[int, int, Block]] = []  # (size, address, block), sorted
        self._tail: Block | None = None  # the last block of the expandable segment

    def take(self, size: int) -> Block:
        """Return a block of at least `size` bytes, out of a free one or of memory reserved for it."""
        block = self._best_fit(size) or self._reserve(size)
        rest = block.size - size
        if rest >= UNIT if self.small or self._expandable else rest > SMALL:
            self._split(block, size)
        return block

    def give_back(self, block: Block) -> None:
        """Free a block and merge it with its free neighbours."""
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._unlist(other)
                self._merge(block, other)
        self._list(block)

    def _best_fit(self, size: int) -> Block | None:
        """Take the smallest free block that is large enough, at the lowest address if there are several."""
        fitting = [block for *_, block in self._free[bisect_left(self._free, (size,)) :]]
        if not fitting:
            return None
        # What can still grow counts as larger than everything else.
        chosen = next((block for block in fitting if block is not self._tail), fitting[0])
        self._unlist(chosen)
        return chosen

    def _reserve(self, size: int) -> Block:
        if not self._expandable:
            return self._append(segment_size(size), joined=False)
        page = SMALL_SEGMENT if self.small else LARGE_SEGMENT
        tail = self._tail
        if tail is None or not tail.free:
            return self._append(round_up(size, page), joined=True)
        self._unlist(tail)
        self._merge(tail, self._append(round_up(size - tail.size, page), joined=True))
        return tail

    def _append(self, size: int, *, joined: bool) -> Block:
        """Reserve so many bytes more, behind the last block if the segment goes on there."""
        block = Block(self, self.reserved, size, self._tail if joined else None)
        self.reserved += size
        if joined:
            if self._tail is not None:
                self._tail.after = block
            self._tail = block
        return block

    def _split(self, block: Block, size: int) -> None:
        """Leave `size` bytes to a block and free the rest of it."""
        rest = Block(self, block.address + size, block.size - size, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        if block is self._tail:
            self._tail = rest
        self._list(rest)

    def _merge(self, block: Block, other: Block) -> None:
        """Join a neighbour to a block; neither of them is in the list of free ones."""
        block.size += other.size
        if other is block.before:
            block.address, block.before = other.address, other.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block
        if other is self._tail:
            self._tail = block

    def _list(self, block: Block) -> None:
        block.free = True
        insort(self._free, (block.size, block.address, block))

    def _unlist(self, block: Block) -> None:
        block.free = False
        del self._free[bisect_left(self._free, (block.size, block.address))]


def replay(events: Iterable[Event], *, expandable: bool = False) -> Peaks:
    """Return the peaks of a series of allocations and frees, beginning with nothing reserved.

    Bytes in use are those of blocks, as `torch.cuda.max_memory_allocated` counts them: a block is larger than what was
    asked for by less than 512 bytes, or, in the large pool, by up to 1 MiB that was not worth splitting off.
    """
    small, large = (Pool(small=small, expandable=expandable) for small in (True, False))
    blocks: dict[int, Block] = {}
    used = 0
    peaks = Peaks(0, 0)
    for event in events:
        if event.size is None:
            block = blocks.pop(event.number)
            used -= block.size
            block.pool.give_back(block)
        else:
            size = round_up(event.size, UNIT)
            block = blocks[event.number] = (small if size <= SMALL else large).take(size)
            used += block.size
            peaks = Peaks(max(peaks.allocated, used), small.reserved + large.reserved)
    return peaks


def round_up(size: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


def segment_size(size: int) -> int:
    """Return the bytes of the segment that is reserved for a block of `size` bytes that no free one can hold."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else round_up(size, OWN_UNIT)
