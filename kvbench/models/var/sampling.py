"""VAR's sampling: guidance that grows with the scale, truncation, the draw of tokens, and its smooth variant."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.core.devices import send
from kvbench.models.base import refuse
from kvbench.models.noise import Noise

PIECE_BYTES = 64 << 20
"""Bytes of logits that are truncated at a time."""


@dataclass(frozen=True)
class VARSampling:
    """Sampling of tokens (VAR's inference).

    Attributes:
        cfg: classifier-free guidance of the last scale; that of scale k of K is cfg k / (K - 1), so none at scale 0.
        top_k: only the k most likely codes, ties with the last of them included; 0 for all.
        top_p: least likely codes with a common probability of at most 1 - top_p are never drawn; 0 for no such limit.
        smooth: mix codes by a Gumbel softmax in place of the drawn ones (`more_smooth`; prettier, but not for FID).
    """

    cfg: float = 1.5
    top_k: int = 900
    top_p: float = 0.96
    smooth: bool = False

    def __post_init__(self) -> None:
        refuse(
            "model.sampling",
            self,
            cfg=(self.cfg < 0, "not be negative"),
            top_k=(self.top_k < 0, "not be negative (0 turns it off)"),
            top_p=(not 0 <= self.top_p <= 1, "lie in [0, 1] (0 turns it off)"),
        )


def guide(logits: Tensor, cfg: float, progress: float) -> Tensor:
    """Return (1 + t) conditional - t unconditional with t = cfg x progress.

    Args:
        logits: [2 x prompts, ...], all conditional ones first.
        cfg: guidance of the last scale.
        progress: k / (K - 1) of the scale.
    """
    t = cfg * progress
    conditional, unconditional = logits.chunk(2)
    return ((1 + t) * conditional).sub_(t * unconditional)


def truncate(logits: Tensor, sampling: VARSampling) -> Tensor:
    """Return logits with -inf where top-k, and then top-p of what it left, forbid a code.

    Sorting takes several times the memory of the logits, so tokens are taken in pieces of `PIECE_BYTES`.

    Args:
        logits: float32 [prompts, tokens, codes].
        sampling: the limits.
    """
    rows = logits.view(-1, logits.shape[-1])
    some = max(1, PIECE_BYTES // (rows.shape[1] * rows.element_size()))
    return torch.cat([_truncate(piece, sampling) for piece in rows.split(some)]).view(logits.shape)


def _truncate(logits: Tensor, sampling: VARSampling) -> Tensor:
    if sampling.top_k > 0:
        threshold = logits.topk(min(sampling.top_k, logits.shape[-1]), sorted=True).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -math.inf)
    if sampling.top_p > 0:
        ascending, order = logits.sort(-1)
        rare = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        rare[..., -1] = False
        logits = logits.masked_fill(rare.scatter(-1, order, rare), -math.inf)
    return logits


def choose(logits: Tensor, noise: Noise) -> Tensor:
    """Draw tokens int64 [prompts, tokens] from truncated logits [prompts, tokens, codes].

    The drawn code is argmax p / q with q ~ Exp(1), which is how a single `torch.multinomial` draw works.
    """
    return (logits.softmax(-1) / _exponential(logits, noise)).argmax(-1)


def mix_codes(logits: Tensor, progress: float, noise: Noise) -> Tensor:
    """Return weights [prompts, tokens, codes] that sum to 1: a Gumbel softmax whose temperature falls from 0.27.

    Args:
        logits: truncated, [prompts, tokens, codes].
        progress: k / (K - 1) of the scale.
        noise: drawn from after the tokens of the scale.
    """
    gumbel = -_exponential(logits, noise).log()
    temperature = max(0.27 * (1 - 0.95 * progress), 0.005)
    return (((1 + progress) * logits + gumbel) / temperature).softmax(-1)


def _exponential(logits: Tensor, noise: Noise) -> Tensor:
    return send(noise.draw(logits[0].numel()), logits.device).view(logits.shape)
