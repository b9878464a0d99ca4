"""VAR's next-scale loop: sample the tokens of a scale, add their codes, shrink the sum to the next scale's input."""

from functools import partial

import torch
from torch import Tensor

from kvbench.core.devices import reserve
from kvbench.core.segments import Segment
from kvbench.forced.passes import ForcedScales
from kvbench.models.base import Cache, FiniteCheck
from kvbench.models.noise import Noise
from kvbench.models.var.sampling import VARSampling, draw_tokens, guide, gumbel_softmax, truncate
from kvbench.models.var.tokenizer import VQVAE, shrink
from kvbench.models.var.transformer import VAR, ClassCondition


@torch.inference_mode()
def draw_token_scales(
    transformer: VAR,
    tokenizer: VQVAE,
    labels: Tensor,
    cache: Cache,
    noise: Noise,
    sampling: VARSampling,
    *,
    activations: int = 0,
    forced: ForcedScales | None = None,
) -> Tensor:
    """Generate images' codes for a batch of classes (VAR inference with classifier-free guidance).

    Args:
        transformer: the model; its blocks' dtype decides the rounding.
        tokenizer: maps tokens to codes and adds them; the caller decodes the result.
        labels: int64 [B], `transformer.config.classes` for no class.
        cache: cache of keys and values; conditional sequences come before unconditional sequences.
        noise: randomness, per prompt.
        sampling: guidance and truncation.
        activations: bytes for a layer's activations, which a GPU's allocator reserves as one block.
        forced: records logits and tokens, and may supply the tokens instead of sampling; not with `smooth`.

    Returns:
        Sum of all codes, float32 [B, channels, H, W], the tokenizer's decoder input.

    Raises:
        NotFinite: logits are not finite.
    """
    config, segments = transformer.config, transformer.config.segments
    prompts, last = len(labels), segments[-1]
    condition = transformer.condition(torch.cat((labels, torch.full_like(labels, config.classes))))
    summed = torch.zeros(prompts, config.channels, last.height, last.width, device=labels.device)
    features: Tensor | None = None
    finite = FiniteCheck()
    cache.reset(2 * prompts)
    repetitions = cache.repetitions
    if repetitions is not None:
        condition = repetitions.hold(condition)
    if repetitions is None or repetitions.by_launches:  # recorded work has memory of its own
        # After long-lived tensors, which would otherwise be allocated inside the reserved block.
        reserve(activations, labels.device)
    for segment in segments:
        cache.begin(segment)
        progress = segment.index / last.index
        work = partial(compute_logits, transformer, segment, condition, cache, sampling.cfg, progress)
        inputs = () if features is None else (features,)
        key = segment.index, id(condition)
        logits = work(*inputs) if repetitions is None else repetitions.run(key, work, *inputs)
        # The host draws noise while a GPU computes the logits, and does not wait.
        if forced is None:
            codes = draw_codes(logits, tokenizer, noise, sampling, progress)
        else:
            draw = partial(_draw_truncated, logits, sampling, noise)
            codes = tokenizer.codes(forced.choose(segment, logits, draw))
        finite.note(logits, segment.index)
        codes = codes.unflatten(1, (segment.height, segment.width))
        summed = tokenizer.add(summed, codes, segment.index, len(segments))
        if not segment.last:
            features = make_features(summed, segments[segment.index + 1]).repeat(2, 1, 1)
    finite.conclude()
    return summed


def compute_logits(
    transformer: VAR,
    segment: Segment,
    condition: ClassCondition,
    cache: Cache,
    cfg: float,
    progress: float,
    features: Tensor | None = None,
) -> Tensor:
    """Return the guided logits of one scale, float32 [prompts, t_k, codes]."""
    return guide(transformer.scale(segment, condition, features, cache.attend), cfg, progress)


def draw_codes(
    logits: Tensor, tokenizer: VQVAE, noise: Noise, sampling: VARSampling, progress: float
) -> Tensor:
    """Sample codes float32 [prompts, t_k, channels] of one scale from its guided logits [prompts, t_k, codes].

    With `smooth`, tokens are sampled too and dropped, to use as much noise as the official code.
    """
    logits = truncate(logits, sampling)
    tokens = draw_tokens(logits, noise)
    if sampling.smooth:
        return gumbel_softmax(logits, progress, noise) @ tokenizer.quantize.embedding.weight
    return tokenizer.codes(tokens)


def _draw_truncated(logits: Tensor, sampling: VARSampling, noise: Noise) -> Tensor:
    return draw_tokens(truncate(logits, sampling), noise)


def make_features(summed: Tensor, segment: Segment) -> Tensor:
    """Average the sum of codes [B, channels, H, W] over the grid of a scale, [B, t_k, channels]."""
    return shrink(summed, (segment.height, segment.width)).flatten(2).transpose(1, 2)
