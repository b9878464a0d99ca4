"""Comparison of next-token predictions with the full cache's."""

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 128
"""Number of tokens that are compared at once, to bound the memory of logits."""


@torch.inference_mode()
def compare_states(
    states: Tensor, full: Tensor, tokens: Tensor, find_logits: Callable[[Tensor, int], Tensor]
) -> dict[str, NDArray[Any]]:
    """Return a `ScoredText`'s `COLUMNS` except `tokens`, arrays [n] by name.

    Args:
        states: hidden states [n, ...] that predict the tokens, under the method.
        full: hidden states under the full cache, shaped like `states`.
        tokens: the text's tokens, int64 [n] or bool [n, bits].
        find_logits: maps states and the index of their first token to logits, float32 [n, vocabulary], or [n, bits, 2]
            for tokens of several bits.
    """
    parts = []
    for start in range(0, len(tokens), BLOCK):
        of_method, of_full, targets = (x[start : start + BLOCK] for x in (states, full, tokens))
        parts.append(compare_logits(find_logits(of_method, start), find_logits(of_full, start), targets))
    return {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}


def compare_logits(logits: Tensor, full: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """Compare logits float32 [n, vocabulary] or [n, bits, 2] with the full cache's; see `compare_states`.

    Bits of a token are independent, so that their divergences and log-probabilities add. Logits of -inf, at the same
    indices in both, exclude a token.
    """
    log_method, log_full = logits.log_softmax(-1), full.log_softmax(-1)
    change = (log_full - log_method).masked_fill(log_full == -torch.inf, 0)
    targets = tokens.long().unsqueeze(-1)
    values = {
        "kl": (log_full.exp() * change).sum(-1).clamp(min=0),
        "nll": -log_method.gather(-1, targets).squeeze(-1),
        "nll_full": -log_full.gather(-1, targets).squeeze(-1),
    }
    top1 = {"likeliest": log_method.argmax(-1), "likeliest_full": log_full.argmax(-1)}
    if logits.ndim > 2:
        values = {name: value.sum(-1) for name, value in values.items()}
    return {
        **values,
        **{name: pack_bits(token) if logits.ndim > 2 else token.int() for name, token in top1.items()},
    }


def pack_bits(bits: Tensor) -> Tensor:
    """Return tokens int64 [n] from bits [n, at most 63], the least significant first."""
    return (bits.long() << torch.arange(bits.shape[-1], device=bits.device)).sum(-1)


def unpack_bits(tokens: Tensor, bits: int) -> Tensor:
    """Return the bits, bool [n, bits], of tokens int64 [n], the least significant first."""
    return (tokens.unsqueeze(-1) >> torch.arange(bits, device=tokens.device) & 1).bool()
