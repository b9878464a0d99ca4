"""Next-token loop of image models: the condition in one step, then one image token at a time."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvbench.core.devices import reserve
from kvbench.core.segments import Segment
from kvbench.models.base import Cache, require_finite
from kvbench.models.noise import Noise, draw_ahead
from kvbench.models.parts.decoder import Decoder
from kvbench.models.parts.sampling import TokenSampling, draw_token, guide, truncate
from kvbench.models.parts.step_graph import open_steps


@torch.inference_mode()
def draw_image_tokens(
    transformer: Decoder,
    condition: Tensor,
    segments: Sequence[Segment],
    cache: Cache,
    noise: Noise,
    sampling: TokenSampling,
    *,
    padding: Sequence[int] | None = None,
    forbidden: Callable[[int], Tensor] | None = None,
    activations: int = 0,
) -> Tensor:
    """Draw the tokens of a batch of images.

    Args:
        transformer: the model; its dtype decides the rounding.
        condition: embedded, [sequences, tokens, width]; with guidance the unconditional prompts follow all others.
        segments: the condition, then the image's tokens except the last.
        cache: cache of keys and values.
        noise: randomness, per prompt.
        sampling: guidance and truncation.
        padding: number of padding tokens in front of each condition; None if all conditions are equally long.
        forbidden: returns the codes that an image token cannot be, bool [codes], by the token's number from 0; None
            if every code is allowed. Noise is drawn for all codes.
        activations: bytes for a layer's activations, which a GPU's allocator reserves as one block.

    Returns:
        int64 [prompts, image tokens], row-major.

    Raises:
        NotFinite: logits are not finite.
    """
    rotation = transformer.rotations(segments[-1].end + 1)
    cache.reset(len(condition), padding)
    # After tensors that live as long as the generation, which would otherwise be cut from the same block.
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
                drawn.append(draw_token(truncate(logits, sampling), noise))
                x = transformer.embed(drawn[-1]).repeat(sampling.branches, 1)[:, None]
            # Once per segment, because the host waits for a GPU here; a sum is finite only if all its logits are.
            require_finite(torch.stack(sums, 1), segment.index)
    return torch.stack(drawn, 1)
