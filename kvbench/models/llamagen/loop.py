"""The next-token loop of image models: the condition at once, then one image token after the other."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvbench.core.devices import reserve
from kvbench.core.segments import Segment
from kvbench.models.base import Cache, require_finite
from kvbench.models.llamagen.sampling import LlamaGenSampling, choose, guide, truncate
from kvbench.models.noise import Noise, draw_ahead
from kvbench.models.parts.decoder import Decoder
from kvbench.models.parts.step_graph import open_steps


@torch.inference_mode()
def generate(
    transformer: Decoder,
    condition: Tensor,
    segments: Sequence[Segment],
    cache: Cache,
    noise: Noise,
    sampling: LlamaGenSampling,
    *,
    padding: Sequence[int] | None = None,
    forbidden: Callable[[int], Tensor] | None = None,
    activations: int = 0,
) -> Tensor:
    """Draw the tokens of a batch of images.

    Args:
        transformer: the model; its dtype decides the rounding.
        condition: embedded, [sequences, tokens, width]; all conditional prompts, then all unconditional ones if there
            is guidance.
        segments: the condition, then the image's tokens but for the last.
        cache: holds keys and values.
        noise: randomness, per prompt.
        sampling: guidance and truncation.
        padding: tokens in front of each sequence's condition that do not exist; None where all conditions are equally
            long.
        forbidden: tells of an image token by its number, from 0, which codes it cannot be: bool [codes]; None where
            each can be any. Noise is drawn for all of them.
        activations: bytes that a GPU's allocator takes as one piece beforehand, for what a layer works on.

    Returns:
        int64 [prompts, image tokens], row-major.

    Raises:
        NotFinite: logits are not finite.
    """
    rotation = transformer.rotations(segments[-1].end + 1)
    cache.reset(len(condition), padding)
    # After what lives as long as the generation, which would else be cut from the same piece.
    reserve(activations, condition.device)
    x = condition
    drawn: list[Tensor] = []
    prompts = len(condition) // sampling.branches
    tokens = segments[-1].end - segments[0].end + 1
    with draw_ahead(noise, prompts, transformer.config.choices, tokens, condition.device) as noise:
        for segment in segments:
            cache.begin(segment)
            step = open_steps(transformer, cache, segment)
            sums = []
            for start in range(segment.start, segment.end, x.shape[1]):
                logits = guide(step(x, rotation[start : start + x.shape[1]]), sampling, len(drawn))
                sums.append(logits.sum(-1))
                if forbidden is not None:
                    logits = logits.masked_fill(forbidden(len(drawn)), -math.inf)
                drawn.append(choose(truncate(logits, sampling), noise))
                x = transformer.embed(drawn[-1]).repeat(sampling.branches, 1)[:, None]
            # Once per segment, since the host waits for a GPU here; a sum is finite only if all its logits are.
            require_finite(torch.stack(sums, 1), segment.index)
    return torch.stack(drawn, 1)
