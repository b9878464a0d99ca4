"""Steps of a next-token model, run one by one or recorded once per segment and replayed.

A step launches hundreds of small GPU kernels, and launching them can take longer than running them. All steps of a
segment except the first and the last do the same work on other numbers, because storage only changes at its end.
"""

from collections.abc import Callable

from torch import Tensor

from kvbench.core.graphs import GraphRecorder
from kvbench.core.segments import Segment
from kvbench.models.base import Cache
from kvbench.models.parts.decoder import Decoder

Step = Callable[[Tensor, Tensor], Tensor]
"""Maps tokens [sequences, tokens, width] and their rotations [tokens, head_dim/2] to the last token's logits."""


def open_steps(transformer: Decoder, cache: Cache, segment: Segment) -> Step:
    """Return the function that runs a segment's steps, after `cache.begin`."""

    def step(x: Tensor, rotation: Tensor) -> Tensor:
        return transformer.logits(transformer(x, rotation, cache.attend)[:, -1])

    return step if cache.record is None else StepGraph(step, segment.length, cache.record, cache.advance)


class StepGraph:
    """Steps of a segment, of which the second is recorded and replayed.

    The first step prepares shared state and compiles kernels, and in the last one the method decides what to keep;
    both run directly.

    Args:
        step: the model's step.
        length: tokens of the segment.
        record: records a step.
        advance: counts a token whose step was replayed.
    """

    def __init__(self, step: Step, length: int, record: GraphRecorder, advance: Callable[[], None]) -> None:
        self._step, self._record, self._advance = step, record, advance
        self._length, self._seen = length, 0
        self._repeat: Callable[[], object] | None = None

    def __call__(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Run the next step (`Step`); the step after it overwrites the result."""
        first = not self._seen
        self._seen += x.shape[1]
        if first or self._seen == self._length or x.shape[1] > 1:
            return self._step(x, rotation)
        if self._repeat is None:
            self._x, self._rotation = x.clone(), rotation.clone()
            self._logits, self._repeat = self._record(lambda: self._step(self._x, self._rotation))
        else:
            self._x.copy_(x)
            self._rotation.copy_(rotation)
            self._advance()
        self._repeat()
        return self._logits
