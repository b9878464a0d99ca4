"""Sampling of image tokens: guidance, temperature, truncation, the draw of a token.

Shapes: B prompts, V tokens that can be drawn.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.models.base import refuse
from kvbench.models.noise import Noise


@dataclass(frozen=True)
class TokenSampling:
    """Base class of the sampling settings of image tokens.

    Attributes:
        cfg: classifier-free guidance; 1 for none, which halves the sequences.
        cfg_interval: image tokens that are drawn with guidance after the first two; -1 for all.
        temperature: divisor of guided logits.
        top_k: only the k most likely codes, ties with the last of them included; 0 for all.
        top_p: drop codes whose likelier ones have a total probability above top_p; 1 for no such limit.
    """

    cfg: float = 4.0
    cfg_interval: int = -1
    temperature: float = 1.0
    top_k: int = 2000
    top_p: float = 1.0

    temperature_first: ClassVar[bool] = True
    """Whether top-k ranks logits over the temperature, where rounding may make two of them equal."""

    def __post_init__(self) -> None:
        refuse(
            "model.sampling",
            self,
            cfg=(self.cfg < 1, "be at least 1 (which is no guidance)"),
            cfg_interval=(self.cfg_interval < -1, "not be negative, or -1 for all tokens"),
            temperature=(self.temperature <= 0, "be positive (top_k=1 takes the likeliest)"),
            top_k=(self.top_k < 0, "not be negative (0 turns it off)"),
            top_p=(not 0 < self.top_p <= 1, "be in (0, 1] (1 turns it off)"),
        )

    @property
    def branches(self) -> int:
        """Sequences per prompt."""
        return 2 if self.cfg > 1 else 1


def guide(logits: Tensor, sampling: TokenSampling, token: int) -> Tensor:
    """Return unconditional + cfg x (conditional - unconditional), or the conditional logits where there is no guidance.

    Args:
        logits: float32 [branches x B, V], all conditional ones first.
        sampling: strength and interval.
        token: number of the image token.
    """
    if sampling.branches == 1:
        return logits
    conditional, unconditional = logits.chunk(2)
    # The official program counts from the second token on, and always guides the first one.
    if -1 < sampling.cfg_interval < token - 1:
        return conditional
    return unconditional + (conditional - unconditional) * sampling.cfg


def truncate(logits: Tensor, sampling: TokenSampling) -> Tensor:
    """Return logits [B, V] over the temperature, -inf where top-k, and then top-p, forbid a code."""
    cooled = logits / max(sampling.temperature, 1e-5)
    ranked, logits = cooled if sampling.temperature_first else logits, cooled
    if sampling.top_k > 0:
        threshold = ranked.topk(min(sampling.top_k, ranked.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(ranked < threshold, -math.inf)
    if sampling.top_p < 1:
        descending, order = logits.sort(-1, descending=True)
        rare = descending.softmax(-1).cumsum(-1) > sampling.top_p
        rare = torch.cat((torch.zeros_like(rare[..., :1]), rare[..., :-1]), -1)
        logits = logits.masked_fill(rare.scatter(-1, order, rare), -math.inf)
    return logits


def draw_token(logits: Tensor, noise: Noise) -> Tensor:
    """Draw a token int64 [B] from truncated logits [B, V].

    The result is argmax p / q with q ~ Exp(1), which is how a single `torch.multinomial` draw works.
    """
    # A copy from pinned memory is asynchronous; a copy from pageable memory reads its contents now.
    exponential = noise.draw(logits.shape[-1]).to(logits.device, non_blocking=True)
    return (logits.softmax(-1) / exponential).argmax(-1)
