"""Draws of codes, candidates and bits, and mixtures of codes, with random numbers by counter (`philox`).

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
"""Codes up to which the program finds the threshold of top-k itself: it reads a token's logits 32 times."""


def keep_top(logits: Tensor, temperature: float, top_k: int, cool_first: bool) -> Tensor:
    """Return logits [..., V] over a temperature, -inf but for the `top_k` likeliest and ties with the last; 0 is all.

    With `cool_first`, top-k ranks logits over the temperature, where rounding may make two of them equal.
    """
    cooled = logits / temperature
    if top_k == 0:
        return cooled
    ranked = cooled if cool_first else logits
    threshold = ranked.topk(min(top_k, ranked.shape[-1])).values[..., -1:]
    return cooled.masked_fill(ranked < threshold, -math.inf)


def draw_codes(
    logits: Tensor,
    keys: Tensor,
    step: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    cool_first: bool = True,
) -> Tensor:
    """Draw a code of each token, int64 [B, t], from logits [B, t, V], -inf where a code is forbidden.

    The result is argmax p / q with q ~ Exp(1), which is how a single `torch.multinomial` draw works. Temperature, top-k
    and `cool_first` are as in `keep_top`.
    """
    if uses_triton(logits) and (top_k == 0 or logits.shape[-1] <= MAX_TRUNCATED):
        from kvbench.kernels.triton.draw import draw_codes_triton

        return draw_codes_triton(logits, keys, step, temperature, top_k, cool_first)
    logits = keep_top(logits, temperature, top_k, cool_first)
    if uses_triton(logits):
        return draw_codes(logits, keys, step)
    return pick(logits, draw_integers(keys, step, CODES, *logits.shape[1:]))


def draw_candidate(logits: Tensor, codes: Tensor, keys: Tensor, step: Tensor) -> Tensor:
    """Draw one of `codes` int64 [B, n] by their logits [B, n], -inf where forbidden; return int64 [B].

    A code's random number depends on the code, not on its place.
    """
    if uses_triton(logits):
        from kvbench.kernels.triton.draw import draw_candidate_triton

        return draw_candidate_triton(logits, codes, keys, step)
    best = pick(logits, draw_candidates(keys, step, codes))
    return codes.gather(-1, best[:, None]).squeeze(-1)


def draw_bits(p: Tensor, keys: Tensor, step: Tensor) -> Tensor:
    """Draw bits bool [B, t, C] that are 1 with probabilities float32 p [B, t, C]."""
    return make_uniform(draw_integers(keys, step, BITS, *p.shape[1:])) < p


def mix_codes(logits: Tensor, keys: Tensor, step: Tensor, weight: float, temperature: float) -> Tensor:
    """Return a Gumbel softmax float32 [B, t, V] of `weight` x logits [B, t, V], -inf where a code is forbidden."""
    if uses_triton(logits):
        from kvbench.kernels.triton.draw import mix_codes_triton

        return mix_codes_triton(logits, keys, step, weight, temperature)
    gumbel = -make_exponential(draw_integers(keys, step, MIXTURE, *logits.shape[1:])).log()
    return ((weight * logits + gumbel) / temperature).softmax(-1)


def pick(logits: Tensor, numbers: Tensor) -> Tensor:
    """Return the index of the winner of each row, int64 [...], of logits and their integers [..., n]."""
    weights = (logits.float() - logits.amax(-1, keepdim=True)).exp_()
    return (weights / make_exponential(numbers)).argmax(-1)
