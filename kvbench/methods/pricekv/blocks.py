"""Blocks: the segments whose tokens a head holds or drops together."""

from dataclasses import dataclass

from kvbench.core.segments import ModelSpec


@dataclass(frozen=True)
class Blocks:
    """How a sequence is divided; the last block ends with the segment that is never cached.

    Attributes:
        of_segment: block of each segment.
        lengths: tokens of each block.
        early: tokens of each block that every head holds when the block's last segment starts: those of its other
            segments.
    """

    of_segment: tuple[int, ...]
    lengths: tuple[int, ...]
    early: tuple[int, ...]


def group_segments(spec: ModelSpec, most: int) -> Blocks:
    """Divide a sequence into at most `most` blocks, one per segment where they suffice.

    The first segment (the first scale or the prompt) is a block by itself; those behind it are grouped evenly, and
    groups that have one segment more come first.

    Args:
        spec: the model.
        most: blocks, at least 2.
    """
    others = len(spec.segments) - 1
    groups = min(others, most - 1)
    size, more = divmod(others, groups) if groups else (0, 0)
    counts = [1, *[size + 1] * more, *[size] * (groups - more)]
    of_segment = tuple(block for block, count in enumerate(counts) for _ in range(count))
    lengths, early = [0] * len(counts), [0] * len(counts)
    for block, tokens in zip(of_segment, spec.lengths, strict=True):
        early[block] = lengths[block]
        lengths[block] += tokens
    return Blocks(of_segment, tuple(lengths), tuple(early))
