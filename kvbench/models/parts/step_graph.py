"""Steps of a next-token model: run one by one, or recorded once per segment and repeated.

A step asks a GPU for hundreds of small kernels, whose launches can take longer than the kernels do. Within a segment
all steps but the first and the last are the same work on other numbers, since storage changes at its end alone.
"""

from collections.abc import Callable

from torch import Tensor

from kvbench.core.graphs import Record
from kvbench.core.segments import Segment
from kvbench.models.base import Cache
from kvbench.models.parts.decoder import Decoder

Step = Callable[[Tensor, Tensor], Tensor]
"""Maps tokens [sequences, tokens, width] and their rotations [tokens, head_dim/2] to the last one's logits."""


def open_steps(transformer: Decoder, cache: Cache, segment: Segment) -> Step:
    """Return the function that runs a segment's steps, after `cache.begin`."""

    def step(x: Tensor, rotation: Tensor) -> Tensor:
        return transformer.logits(transformer(x, rotation, cache.attend)[:, -1])

    return step if cache.record is None else StepGraph(step, segment.length, cache.record, cache.advance)


class StepGraph:
    """A segment's steps, the inner ones recorded once and repeated.

    The first step prepares what the others share, and compiles what they launch; the last one asks the method what to
    keep. Both run as they are.

    Args:
        step: the model's.
        length: tokens of the segment.
        record: records the second step.
        advance: counts a step of one token that was repeated without `step` being called.
    """

    def __init__(self, step: Step, length: int, record: Record, advance: Callable[[], None]) -> None:
        self._step, self._record, self._advance = step, record, advance
        self._length, self._came = length, 0
        self._repeat: Callable[[], object] | None = None

    def __call__(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Run the next step (`Step`); what it returns is overwritten by the one after it."""
        first = not self._came
        self._came += x.shape[1]
        if first or self._came == self._length or x.shape[1] > 1:
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
