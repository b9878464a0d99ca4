"""Infinity's next-scale loop: sample the bits of a scale, add their codes, resize the sum to the next scale's input."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.devices import reserve
from kvbench.core.segments import Segment
from kvbench.forced.passes import ForcedScales
from kvbench.models.base import Cache, FiniteCheck, TextFeatures
from kvbench.models.infinity.sampling import Sampling, draw_bits, guide
from kvbench.models.infinity.tokenizer import BSQ
from kvbench.models.infinity.transformer import Infinity, TextCondition
from kvbench.models.noise import Noise
from kvbench.models.parts.autoencoder import resize

PADDING_MULTIPLE = 64
"""With CUDA graphs, texts are padded to a multiple of this word count, because each length needs its own graph."""


def pair_text(transformer: Infinity, text: TextFeatures, negative: TextFeatures | None) -> TextFeatures:
    """Return conditional texts followed by unconditional texts.

    If `negative` is None, the unconditional text of a prompt of n words is the first n learned rows.
    """
    if negative is None:
        rows = [transformer.cfg_uncond[:length] for length in text.lengths]
        negative = TextFeatures(torch.cat(rows).to(text.values), text.lengths)
    return TextFeatures(torch.cat((text.values, negative.values)), text.lengths + negative.lengths)


@torch.inference_mode()
def draw_bit_scales(
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
    forced: ForcedScales | None = None,
) -> Tensor:
    """Generate images' codes for a batch of prompts (Infinity inference with classifier-free guidance).

    Args:
        transformer: the model; its blocks' dtype decides the rounding.
        tokenizer: maps bits to codes; the caller decodes the result.
        text: encoded prompts.
        segments: the scale schedule in tokens.
        cache: cache of keys and values; conditional sequences come before unconditional sequences.
        noise: randomness, per prompt.
        sampling: guidance, temperature, truncation.
        negative: encoded negative prompts; None for the learned unconditional text.
        activations: bytes for a layer's activations, which a GPU's allocator reserves as one block.
        forced: records logits and bits, and may supply the bits instead of sampling.

    Returns:
        Sum of all codes, float32 [B, d, H, W], the tokenizer's decoder input.

    Raises:
        NotFinite: logits are not finite.
    """
    scales = sampling.per_scale(len(segments))
    guided = sampling.branches(len(segments)) == 2
    repetitions = cache.repetitions
    fill = 1 if repetitions is None else PADDING_MULTIPLE
    texts = pair_text(transformer, text, negative) if guided else text
    values, mask = texts.pad(-(-max(texts.lengths) // fill) * fill)
    condition = transformer.condition(values, mask)
    rotation = transformer.rotation(segments, values.device)
    prompts, channels = len(text.lengths), tokenizer.config.bits
    patch = 2 if transformer.config.token_channels == 4 * channels else 1
    grid = (segments[-1].height * patch, segments[-1].width * patch)
    summed = torch.zeros(prompts, channels, *grid, device=values.device)
    features: Tensor | None = None
    finite = FiniteCheck()
    cache.reset(len(values))
    if repetitions is not None:
        condition, rotation = repetitions.hold((condition, rotation))
    if repetitions is None or repetitions.by_launches:  # recorded work has memory of its own
        # After long-lived tensors, which would otherwise be allocated inside the reserved block.
        reserve(activations, values.device)
    for segment, (cfg, tau) in zip(segments, scales, strict=True):
        cache.begin(segment)
        work = partial(
            compute_logits, transformer, segment, condition, rotation, cache, cfg, tau, sampling, guided
        )
        inputs = () if features is None else (features,)
        key = segment.index, id(condition)
        logits = work(*inputs) if repetitions is None else repetitions.run(key, work, *inputs)
        # The host draws noise while a GPU computes the logits, and does not wait.
        pairs = logits.unflatten(-1, (-1, 2))
        draw = partial(draw_bits, pairs, sampling, noise)
        bits = draw() if forced is None else forced.choose(segment, pairs, draw)
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
    condition: TextCondition,
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
    rotation = rotation[segment.start : segment.end]
    layers = transformer.layers
    cfg_layers = sampling.cfg_layers if guided and cfg != 1 else ()
    for layer, block in enumerate(layers):
        x = block(x, layer, condition.layers[layer], rotation, cache.attend)
        if layer - len(layers) in cfg_layers:
            x = guide(x, cfg).repeat(2, 1, 1)
    if 0 in cfg_layers:
        return guide(transformer.logits(x, condition) * (1 / tau), cfg)
    factor, shift = condition.head
    conditional = TextCondition(condition.start, (factor[:prompts], shift[:prompts]), condition.layers)
    return transformer.logits(x[:prompts], conditional) * (1 / tau)
