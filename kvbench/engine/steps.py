"""Steps of a causal segment: number of tokens so far, and queries of steps that a recording repeats."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.core.segments import Segment


class Steps:
    """Counter of the current causal segment's tokens, and their queries at fixed addresses.

    Attributes:
        filled: int64 [1], tokens of the segment before the step, for kernels.
        count: `filled` on the host.
        recorded: whether a recording repeats the steps, so that only the device counts within a step.

    Args:
        segments: all segments of a generation.
        device: device of `filled`.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self._longest = max((segment.length for segment in segments[1:]), default=0)
        with torch.inference_mode(mode=False):
            self.filled = torch.zeros(1, dtype=torch.int64, device=device)
        self.clear()
        self.begin()

    def clear(self) -> None:
        """Free the buffers of queries."""
        self._queries: dict[tuple[int, int], Tensor] = {}  # buffers by number of sequences and layer

    def begin(self) -> None:
        """Begin a segment: set both counts to 0."""
        self.filled.zero_()
        self.count, self.recorded = 0, False

    def advance_to(self, count: int) -> None:
        """Set both counts; the device adds the difference to its own, which a recording can repeat."""
        if count != self.count:
            self.filled.add_(count - self.count)
            self.count = count

    def store_queries(self, layer: int, new: Tensor) -> None:
        """Store a step's queries of a layer, [S, H, query heads per KV head, 1, D]."""
        key = len(new), layer
        if key not in self._queries:
            self._queries[key] = new.new_empty(*new.shape[:3], self._longest, new.shape[4])
        self._queries[key].index_copy_(3, self.filled, new)

    def read_queries(self, sequences: int, layer: int) -> Tensor:
        """Return a layer's queries stored in this segment, [S, H, query heads per KV head, T, D]."""
        return self._queries[sequences, layer][:, :, :, : self.count]
