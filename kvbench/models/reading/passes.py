"""Pass of a decoder over given tokens, segment by segment."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvbench.core.segments import Segment
from kvbench.models.base import Cache, require_finite
from kvbench.models.parts.decoder import Decoder


@torch.inference_mode()
def read_segments(
    transformer: Decoder,
    embed: Callable[[int, int], Tensor],
    length: int,
    segments: Sequence[Segment],
    cache: Cache,
    padding: Sequence[int] | None,
    first: int,
) -> Tensor:
    """Read tokens and return the states that predict the next ones, [sequences, length - first, width].

    Args:
        transformer: the model; its dtype decides the rounding.
        embed: returns embedded tokens [sequences, tokens, width] from one position up to another.
        length: number of tokens; later segments are left out, and the last one may be incomplete.
        segments: the schedule; the tokens of a segment come at once.
        cache: cache of keys and values.
        padding: number of padding tokens in front of each sequence; None if there are none.
        first: position of the first token whose state is returned.

    Raises:
        NotFinite: states are not finite.
    """
    rotation, states = transformer.rotations(length), []
    x = embed(0, segments[0].end)
    cache.reset(len(x), padding if any(padding or ()) else None)
    for segment in segments:
        start, end = segment.start, min(segment.end, length)
        if start >= end:
            break
        cache.begin(segment)
        x = transformer(embed(start, end) if start else x, rotation[start:end], cache.attend)
        if end > first:
            states.append(x[:, max(first - start, 0) :])
            require_finite(states[-1], segment.index)
    return torch.cat(states, 1)
