"""Sampling of image tokens: guidance, temperature, truncation, the choice of a token.

Shapes: B prompts, V tokens that can be sampled.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.kernels.draw import draw_codes, keep_top
from kvbench.models.base import refuse
from kvbench.models.noise import CounterNoise, Noise


@dataclass(frozen=True)
class TokenSampling:
    """Base class of the sampling settings of image tokens.

    Attributes:
        cfg: scale of classifier-free guidance; 1 disables it, which halves the sequences.
        cfg_interval: number of image tokens with guidance after the first two, which always have it; -1 for all.
        temperature: divisor of guided logits.
        top_k: keep the k most probable codes, and ties with the last of them; 0 keeps all.
        top_p: drop a code if more probable ones have a total probability above top_p; 1 drops none.
    """

    cfg: float = 4.0
    cfg_interval: int = -1
    temperature: float = 1.0
    top_k: int = 2000
    top_p: float = 1.0

    temperature_first: ClassVar[bool] = True
    """Whether top-k ranks logits divided by the temperature, which rounding may make equal."""

    def __post_init__(self) -> None:
        refuse(
            "model.sampling",
            self,
            cfg=(self.cfg < 1, "be at least 1 (1 disables guidance)"),
            cfg_interval=(self.cfg_interval < -1, "not be negative, or -1 for all tokens"),
            temperature=(self.temperature <= 0, "be positive (top_k=1 takes the most probable)"),
            top_k=(self.top_k < 0, "not be negative (0 turns it off)"),
            top_p=(not 0 < self.top_p <= 1, "be in (0, 1] (1 turns it off)"),
        )

    @property
    def branches(self) -> int:
        """Number of sequences per prompt, 2 with guidance."""
        return 2 if self.cfg > 1 else 1

    def guides(self, token: int) -> bool:
        """Return whether the image token of this index is sampled with guidance."""
        # The official code counts from the second token on, and always guides the first one.
        return self.branches == 2 and not -1 < self.cfg_interval < token - 1


def guide(logits: Tensor, sampling: TokenSampling, token: int) -> Tensor:
    """Return unconditional + cfg x (conditional - unconditional), or the conditional logits without guidance.

    Args:
        logits: float32 [branches x B, V], conditional rows first.
        sampling: scale and interval of the guidance.
        token: index of the image token.
    """
    if sampling.branches == 1:
        return logits
    conditional, unconditional = logits.chunk(2)
    if not sampling.guides(token):
        return conditional
    return unconditional + (conditional - unconditional) * sampling.cfg


def truncate(logits: Tensor, sampling: TokenSampling) -> Tensor:
    """Return logits float32 [B, V] / temperature, -inf where top-k, and then top-p, exclude a code."""
    logits = keep_top(logits, *_read_top(sampling))
    if sampling.top_p < 1:
        descending, order = logits.sort(-1, descending=True)
        rare = descending.softmax(-1).cumsum(-1) > sampling.top_p
        rare = torch.cat((torch.zeros_like(rare[..., :1]), rare[..., :-1]), -1)
        logits = logits.masked_fill(rare.scatter(-1, order, rare), -math.inf)
    return logits


def _read_top(sampling: TokenSampling) -> tuple[float, int, bool]:
    """Return the temperature (at least 1e-5), top_k, and whether top-k ranks logits / temperature."""
    return max(sampling.temperature, 1e-5), sampling.top_k, sampling.temperature_first


def draw_token(logits: Tensor, sampling: TokenSampling, noise: Noise) -> Tensor:
    """Sample a token int64 [B] from logits float32 [B, V], -inf where a code is forbidden.

    The result is argmax p / q with q ~ Exp(1), as of one `torch.multinomial` draw. With counter-based noise one kernel
    does all of it on a GPU, or, if top-p needs a sort, what follows the truncation.
    """
    if not isinstance(noise, CounterNoise):
        logits = truncate(logits, sampling)
        # A copy from pinned memory is asynchronous; a copy from pageable memory reads its contents now.
        exponential = noise.draw(logits.shape[-1]).to(logits.device, non_blocking=True)
        return (logits.softmax(-1) / exponential).argmax(-1)
    if sampling.top_p < 1:
        drawn = draw_codes(truncate(logits, sampling)[:, None], noise.keys, noise.step)
    else:
        drawn = draw_codes(logits[:, None], noise.keys, noise.step, *_read_top(sampling))
    noise.advance()
    return drawn.squeeze(1)
