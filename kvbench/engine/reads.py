"""Bytes that the attention of each step reads from the cache."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbench.core.segments import ModelSpec, Segment


class StepRead(NamedTuple):
    """Cache read of one step, the tokens of one pass.

    Attributes:
        after: tokens between the prompt and the step; negative for the prompt.
        bytes: bytes that each sequence read, over all layers; a single value if all sequences hold the same.
    """

    after: int
    bytes: list[int]


@dataclass
class Reads:
    """Bytes of keys, values, scales and indices in the cache before a step that attention reads.

    The step's own keys and values, codebooks, and what a method reads to make its choice are excluded.

    Attributes:
        steps: reads of each segment's steps, K lists.
    """

    steps: list[list[StepRead]] = field(default_factory=list)

    def record(
        self, spec: ModelSpec, segment: Segment, filled: int, stored: Sequence[int], slot_bytes: int
    ) -> None:
        """Record a step that attends to all held tokens.

        Args:
            spec: the model's shapes.
            segment: the segment of the step.
            filled: tokens of the segment before the step.
            stored: bytes of each sequence's stored tokens, as attention reads them.
            slot_bytes: bytes of a token of this segment in one head.
        """
        pending = filled * spec.all_heads * slot_bytes
        read = StepRead(segment.start + filled - spec.ends[0], [size + pending for size in stored])
        if filled:
            self.steps[segment.index].append(read)
        else:  # a new list, because a recording restores a ledger that shares the old one
            self.steps[segment.index] = [read]

    def leave_out(self, segment: Segment, sequence: int, size: int) -> None:
        """Subtract the bytes that a layer skipped from a sequence's reads in a segment's last step."""
        self.steps[segment.index][-1].bytes[sequence] -= size

    def count(self, sequences: Iterable[int], drawn: int | None = None) -> int:
        """Return the bytes that sequences read.

        Args:
            sequences: indices of the sequences.
            drawn: tokens of their text, of which the last is not fed back; None counts all steps.
        """
        steps = [
            step for segment in self.steps for step in segment if drawn is None or step.after + 1 < drawn
        ]
        return sum(step.bytes[at if len(step.bytes) > 1 else 0] for at in sequences for step in steps)


def add_reads(parts: Sequence[Reads]) -> Reads:
    """Return the reads of a generation whose heads were divided among several caches."""
    joined = []
    for segment in zip(*(part.steps for part in parts), strict=True):
        steps = zip(*segment, strict=True)
        joined.append(
            [
                StepRead(step[0].after, [*map(sum, zip(*(read.bytes for read in step), strict=True))])
                for step in steps
            ]
        )
    return Reads(joined)
