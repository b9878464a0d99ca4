"""Comparison of next-token predictions with the full cache's."""

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 128
"""Tokens that are compared at once, so that few logits are held."""


@torch.inference_mode()
def compare_states(
    states: Tensor, full: Tensor, tokens: Tensor, find_logits: Callable[[Tensor, int], Tensor]
) -> dict[str, NDArray[Any]]:
    """Return the columns of a `ScoredText` but its tokens.

    Args:
        states: hidden states [n, ...] that predict the tokens, under the method.
        full: the same under the full cache.
        tokens: int64 [n], the text's own tokens, or bool [n, bits].
        find_logits: maps states, the same way for both, and the number of their first token to logits float32
            [n, vocabulary], or [n, bits, 2] for tokens of several bits.
    """
    parts = []
    for start in range(0, len(tokens), BLOCK):
        ours, theirs, own = (x[start : start + BLOCK] for x in (states, full, tokens))
        parts.append(compare_logits(find_logits(ours, start), find_logits(theirs, start), own))
    return {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}


def compare_logits(logits: Tensor, full: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """Compare logits float32 [n, vocabulary] or [n, bits, 2] with the full cache's, in float32.

    Bits of a token are independent, so that their divergences and log-probabilities add. Logits of -inf are tokens that
    cannot come, the same ones in both.
    """
    ours, theirs = logits.log_softmax(-1), full.log_softmax(-1)
    change = (theirs - ours).masked_fill(theirs == -torch.inf, 0)
    own = tokens.long().unsqueeze(-1)
    values = {
        "kl": (theirs.exp() * change).sum(-1).clamp(min=0),
        "nll": -ours.gather(-1, own).squeeze(-1),
        "nll_full": -theirs.gather(-1, own).squeeze(-1),
    }
    likeliest = {"likeliest": ours.argmax(-1), "likeliest_full": theirs.argmax(-1)}
    if logits.ndim > 2:
        values = {name: value.sum(-1) for name, value in values.items()}
    return {
        **values,
        **{name: pack_bits(one) if logits.ndim > 2 else one.int() for name, one in likeliest.items()},
    }


def pack_bits(bits: Tensor) -> Tensor:
    """Return tokens int64 [n] of bits [n, at most 63], the first one lowest."""
    return (bits.long() << torch.arange(bits.shape[-1], device=bits.device)).sum(-1)


def unpack_bits(tokens: Tensor, bits: int) -> Tensor:
    """Return the bits bool [n, bits] of tokens int64 [n]."""
    return (tokens.unsqueeze(-1) >> torch.arange(bits, device=tokens.device) & 1).bool()
