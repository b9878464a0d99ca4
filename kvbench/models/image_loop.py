"""Next-token loop of image models: the condition in one step, then one image token at a time."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kvbench.core.devices import reserve
from kvbench.core.segments import Segment
from kvbench.models.base import Cache, require_finite
from kvbench.models.noise import Noise, draw_ahead
from kvbench.models.parts.decoder import Decoder
from kvbench.models.parts.sampling import TokenSampling, draw_token, guide
from kvbench.models.parts.token_steps import DrawnTokens, compute_next, hold_noise, run_step


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
    prompts, first = len(condition) // sampling.branches, segments[0]
    drawn = DrawnTokens.open(prompts, rotation[first.end - 1 : -1])
    if cache.repetitions is not None:
        drawn = cache.repetitions.hold(drawn)
    # After tensors that live as long as the generation, which would otherwise be cut from the same block.
    reserve(activations, condition.device)
    tokens, choices = len(drawn.rotation), transformer.config.choices
    with (
        hold_noise(noise, cache.repetitions) as noise,
        draw_ahead(noise, prompts, choices, tokens, condition.device) as noise,
    ):
        cache.begin(first)
        logits = transformer.logits(transformer(condition, rotation[: first.end], cache.attend)[:, -1])
        draw_next(drawn, logits, sampling, 0, noise, *_list_masks(forbidden, 0))
        require_finite(drawn.sums[:, :1], first.index)
        for segment in segments[1:]:
            cache.begin(segment)
            repeat = cache.open_steps()
            start = segment.start - first.end + 1
            for number in range(start, start + segment.length):
                step = partial(_step, transformer, cache, drawn, sampling, number)
                key, masks = sampling.guides(number), _list_masks(forbidden, number)
                run_step(repeat, key, step, noise, choices, condition.device, *masks)
            # Once per segment, because the host waits for a GPU here.
            require_finite(drawn.sums[:, start : start + segment.length], segment.index)
    return drawn.tokens.clone()


def _list_masks(forbidden: Callable[[int], Tensor] | None, number: int) -> list[Tensor]:
    return [] if forbidden is None else [forbidden(number)]


def _step(
    transformer: Decoder,
    cache: Cache,
    drawn: DrawnTokens,
    sampling: TokenSampling,
    number: int,
    noise: Noise,
    *masks: Tensor,
) -> Tensor:
    logits = compute_next(transformer, cache, drawn, sampling.branches)
    return draw_next(drawn, logits, sampling, number, noise, *masks)


def draw_next(
    drawn: DrawnTokens, logits: Tensor, sampling: TokenSampling, number: int, noise: Noise, *masks: Tensor
) -> Tensor:
    """Draw the next token of each image, int64 [B], and add it to those drawn so far.

    Args:
        drawn: tokens drawn so far.
        logits: float32 [branches x B, V], all conditional ones first.
        sampling: guidance and truncation.
        number: of the token in the image, which decides whether it is guided.
        noise: randomness, per prompt.
        masks: bool [V], codes that the token cannot be.
    """
    logits = guide(logits, sampling, number)
    sums = logits.sum(-1)
    for mask in masks:
        logits = logits.masked_fill(mask, -math.inf)
    return drawn.add(draw_token(logits, sampling, noise), sums)
