"""Sampling of codes, candidates and bits, and Gumbel softmax over codes, with counter-based noise (`philox`).

Shapes: B prompts, t tokens of a step, V codes of a token, C bits of a token. `keys` is int64 [B], `step` int64 [1].
Results differ between processors by the rounding of exponentials and logarithms; the integers behind them are equal.
"""

import math

from torch import Tensor

from kvbench.kernels.philox import (
    BITS,
    CODES,
    MIXTURE,
    draw_candidates,
    draw_integers,
    make_exponential,
    make_uniform,
)
from kvbench.kernels.rms_norm import uses_triton

MAX_TRUNCATED = 2**16
"""Maximum codes for which the Triton kernel finds the threshold of top-k, which reads a token's logits 32 times."""


def keep_top(logits: Tensor, temperature: float, top_k: int, temperature_first: bool) -> Tensor:
    """Return logits [..., V] / temperature, -inf outside the `top_k` largest (ties included); 0 keeps all.

    With `temperature_first`, top-k ranks logits / temperature, of which rounding may make two equal.
    """
    cooled = logits / temperature
    if top_k == 0:
        return cooled
    ranked = cooled if temperature_first else logits
    threshold = ranked.topk(min(top_k, ranked.shape[-1])).values[..., -1:]
    return cooled.masked_fill(ranked < threshold, -math.inf)


def draw_codes(
    logits: Tensor,
    keys: Tensor,
    step: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    temperature_first: bool = True,
) -> Tensor:
    """Sample a code of each token, int64 [B, t], from logits [B, t, V], -inf where a code is forbidden.

    The result is argmax p / q with q ~ Exp(1), which is how a single `torch.multinomial` draw works. Temperature, top-k
    and `temperature_first` are as in `keep_top`.
    """
    if uses_triton(logits) and (top_k == 0 or logits.shape[-1] <= MAX_TRUNCATED):
        from kvbench.kernels.triton.draw import draw_codes_triton

        return draw_codes_triton(logits, keys, step, temperature, top_k, temperature_first)
    logits = keep_top(logits, temperature, top_k, temperature_first)
    if uses_triton(logits):
        return draw_codes(logits, keys, step)
    return sample_index(logits, draw_integers(keys, step, CODES, *logits.shape[1:]))


def draw_candidate(logits: Tensor, codes: Tensor, keys: Tensor, step: Tensor) -> Tensor:
    """Sample one of `codes` int64 [B, n] by their logits [B, n], -inf where forbidden; return int64 [B].

    A code's random number depends on the code, not on its index.
    """
    if uses_triton(logits):
        from kvbench.kernels.triton.draw import draw_candidate_triton

        return draw_candidate_triton(logits, codes, keys, step)
    best = sample_index(logits, draw_candidates(keys, step, codes))
    return codes.gather(-1, best[:, None]).squeeze(-1)


def draw_bits(p: Tensor, keys: Tensor, step: Tensor) -> Tensor:
    """Sample bits bool [B, t, C] that are 1 with probabilities float32 p [B, t, C]."""
    return make_uniform(draw_integers(keys, step, BITS, *p.shape[1:])) < p


def gumbel_softmax(logits: Tensor, keys: Tensor, step: Tensor, weight: float, temperature: float) -> Tensor:
    """Return a Gumbel softmax float32 [B, t, V] of `weight` x logits [B, t, V], -inf where a code is forbidden."""
    if uses_triton(logits):
        from kvbench.kernels.triton.draw import gumbel_softmax_triton

        return gumbel_softmax_triton(logits, keys, step, weight, temperature)
    gumbel = -make_exponential(draw_integers(keys, step, MIXTURE, *logits.shape[1:])).log()
    return ((weight * logits + gumbel) / temperature).softmax(-1)


def sample_index(logits: Tensor, integers: Tensor) -> Tensor:
    """Sample an index per row, int64 [...], from logits and random integers [..., n]."""
    weights = (logits.float() - logits.amax(-1, keepdim=True)).exp_()
    return (weights / make_exponential(integers)).argmax(-1)
