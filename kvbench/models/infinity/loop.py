"""The next-scale loop: bits of one scale, their codes, the input of the next."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.devices import reserve
from kvbench.core.segments import Segment
from kvbench.models.base import Cache, FiniteCheck, TextFeatures
from kvbench.models.infinity.sampling import Sampling, choose
from kvbench.models.infinity.tokenizer import BSQ
from kvbench.models.infinity.transformer import Condition, Infinity
from kvbench.models.noise import Noise
from kvbench.models.parts.autoencoder import resize

WORDS = 64
"""Texts are padded to a multiple of so many words where scales are recorded, of which each number takes a record."""


def pair_text(
    transformer: Infinity, text: TextFeatures, negative: TextFeatures | None, fill: int = 1
) -> tuple[Tensor, Tensor]:
    """Return values and mask of the conditional prompts followed by their unconditional twins, as `pad_text` pads them.

    Without negative prompts the twin of a prompt of n words is the first n rows of the learned unconditional text.
    """
    if negative is None:
        rows = [transformer.cfg_uncond[:length] for length in text.lengths]
        negative = TextFeatures(torch.cat(rows).to(text.values), text.lengths)
    both = TextFeatures(torch.cat((text.values, negative.values)), text.lengths + negative.lengths)
    return pad_text(both, fill)


def pad_text(text: TextFeatures, fill: int) -> tuple[Tensor, Tensor]:
    """Return values and mask of texts, padded to a multiple of `fill` words."""
    return text.pad(-(-max(text.lengths) // fill) * fill)


@torch.inference_mode()
def generate(
    transformer: Infinity,
    tokenizer: BSQ,
    text: TextFeatures,
    segments: Sequence[Segment],
    cache: Cache,
    noise: Noise,
    sampling: Sampling,
    *,
    negative: TextFeatures | None = None,
    activations: int = 0,
) -> Tensor:
    """Draw images' codes for a batch of prompts (Infinity inference with classifier-free guidance).

    Args:
        transformer: the model; its blocks' dtype decides the rounding.
        tokenizer: gives codes their amplitude; decoding is left to the caller.
        text: encoded prompts.
        segments: the scale schedule in tokens.
        cache: holds keys and values; sequences are all conditional prompts, then all unconditional ones.
        noise: randomness, per prompt.
        sampling: guidance, temperature, truncation.
        negative: encoded negative prompts in place of the learned unconditional text.
        activations: bytes that a GPU's allocator takes as one piece beforehand, for what a layer works on.

    Returns:
        Sum of all codes, float32 [B, d, H, W], the tokenizer's decoder input.

    Raises:
        NotFinite: logits are not finite.
    """
    scales = sampling.per_scale(len(segments))
    guided = sampling.branches(len(segments)) == 2
    again = cache.repetitions
    fill = 1 if again is None else WORDS
    values, mask = pair_text(transformer, text, negative, fill) if guided else pad_text(text, fill)
    condition = transformer.condition(values, mask)
    rotation = transformer.rotation(segments, values.device)
    prompts, channels = len(text.lengths), tokenizer.config.bits
    patch = 2 if transformer.config.token_channels == 4 * channels else 1
    grid = (segments[-1].height * patch, segments[-1].width * patch)
    summed = torch.zeros(prompts, channels, *grid, device=values.device)
    features: Tensor | None = None
    finite = FiniteCheck()
    cache.reset(len(values))
    if again is not None:
        condition, rotation = again.hold((condition, rotation))
    # After what lives as long as the generation, which would else be cut from the same piece.
    reserve(activations, values.device)
    for segment, (cfg, tau) in zip(segments, scales, strict=True):
        cache.begin(segment)
        work = partial(
            compute_logits, transformer, segment, condition, rotation, cache, cfg, tau, sampling, guided
        )
        given = () if features is None else (features,)
        key = segment.index, id(condition)
        logits = work(*given) if again is None else again.run(key, work, *given)
        # The host draws its noise while a GPU is still at the logits, and waits for nothing.
        bits = choose(logits.unflatten(-1, (-1, 2)), sampling, noise)
        finite.note(logits, segment.index)
        bits = bits.unflatten(1, (segment.height, segment.width))
        if patch == 2:
            bits = F.pixel_shuffle(bits.permute(0, 3, 1, 2).float(), 2).permute(0, 2, 3, 1) > 0
        summed = tokenizer.add(summed, bits, segment.index)
        if not segment.last:
            features = make_features(summed, segments[segment.index + 1], patch)
    finite.conclude()
    return summed


def make_features(summed: Tensor, segment: Segment, patch: int) -> Tensor:
    """Resize the sum of codes [B, d, H, W] to the input of a scale, [B, t_k, token_channels], bilinearly."""
    resized = resize(summed, (segment.height * patch, segment.width * patch))
    return F.pixel_unshuffle(resized, patch).flatten(2).transpose(1, 2)


def compute_logits(
    transformer: Infinity,
    segment: Segment,
    condition: Condition,
    rotation: Tensor,
    cache: Cache,
    cfg: float,
    tau: float,
    sampling: Sampling,
    guided: bool,
    features: Tensor | None = None,
) -> Tensor:
    """Return the logits of one scale after temperature and guidance, float32 [prompts, t_k, 2 x token_channels]."""
    sequences = len(condition.start)
    prompts = sequences // 2 if guided else sequences
    if features is not None and guided:
        features = features.repeat(2, 1, 1)
    x = transformer.embed(segment.index, condition, features)
    here = rotation[segment.start : segment.end]
    layers = transformer.layers
    mixed = (
        {len(layers) + offset for offset in sampling.cfg_layers if offset < 0}
        if guided and cfg != 1
        else set()
    )
    for layer, block in enumerate(layers):
        x = block(x, layer, condition.layers[layer], here, cache.attend)
        if layer in mixed:
            x = (cfg * x[:prompts] + (1 - cfg) * x[prompts:]).repeat(2, 1, 1)
    if guided and cfg != 1 and 0 in sampling.cfg_layers:
        logits = transformer.logits(x, condition) * (1 / tau)
        return cfg * logits[:prompts] + (1 - cfg) * logits[prompts:]
    factor, shift = condition.head
    conditional = Condition(condition.start, (factor[:prompts], shift[:prompts]), condition.layers)
    return transformer.logits(x[:prompts], conditional) * (1 / tau)
