"""VAR's sampling: guidance that grows with the scale, truncation, sampling of tokens and its smooth variant.

Shapes: B prompts, t tokens of a scale, V codes.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.core.devices import send
from kvbench.kernels import draw as counted
from kvbench.models.base import refuse
from kvbench.models.noise import CounterNoise, Noise

PIECE_BYTES = 64 << 20
"""Maximum bytes of logits that are truncated in one call."""


@dataclass(frozen=True)
class VARSampling:
    """Sampling of tokens (VAR's inference).

    Attributes:
        cfg: classifier-free guidance of the last scale; scale k of K uses cfg k / (K - 1), so scale 0 has none.
        top_k: number of most probable codes that can be sampled, besides ties with the last one; 0 for all.
        top_p: the least probable codes with a total probability of at most 1 - top_p are not sampled; 0 for no limit.
        smooth: whether a Gumbel softmax mixes codes (`more_smooth`: better-looking images, not for FID).
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
            top_p=(not 0 <= self.top_p <= 1, "be in [0, 1] (0 turns it off)"),
        )


def guide(logits: Tensor, cfg: float, progress: float) -> Tensor:
    """Return (1 + t) conditional - t unconditional with t = cfg x progress, where progress is k / (K - 1).

    Logits are [2 x B, ...], conditional rows first.
    """
    t = cfg * progress
    conditional, unconditional = logits.chunk(2)
    return ((1 + t) * conditional).sub_(t * unconditional)


def truncate(logits: Tensor, sampling: VARSampling) -> Tensor:
    """Return logits float32 [B, t, V], -inf where top-k, and then top-p of the rest, forbid a code.

    Sorting takes several times the memory of the logits, so the tokens are processed in pieces of `PIECE_BYTES`.
    """
    rows = logits.view(-1, logits.shape[-1])
    size = max(1, PIECE_BYTES // (rows.shape[1] * rows.element_size()))
    return torch.cat([_truncate(piece, sampling) for piece in rows.split(size)]).view(logits.shape)


def _truncate(logits: Tensor, sampling: VARSampling) -> Tensor:
    logits = counted.keep_top(logits, 1.0, sampling.top_k, temperature_first=True)
    if sampling.top_p > 0:
        ascending, order = logits.sort(-1)
        rare = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        rare[..., -1] = False
        logits = logits.masked_fill(rare.scatter(-1, order, rare), -math.inf)
    return logits


def draw_tokens(logits: Tensor, noise: Noise) -> Tensor:
    """Sample tokens int64 [B, t] from truncated logits [B, t, V].

    The result is argmax p / q with q ~ Exp(1), which is how a single `torch.multinomial` draw works.
    """
    if not isinstance(noise, CounterNoise):
        return (logits.softmax(-1) / _exponential(logits, noise)).argmax(-1)
    tokens = counted.draw_codes(logits, noise.keys, noise.step)
    noise.advance()
    return tokens


def gumbel_softmax(logits: Tensor, progress: float, noise: Noise) -> Tensor:
    """Return a Gumbel softmax [B, t, V] of truncated logits, whose temperature decreases from 0.27 with progress."""
    temperature = max(0.27 * (1 - 0.95 * progress), 0.005)
    if not isinstance(noise, CounterNoise):
        gumbel = -_exponential(logits, noise).log()
        return (((1 + progress) * logits + gumbel) / temperature).softmax(-1)
    mixture = counted.gumbel_softmax(logits, noise.keys, noise.step, 1 + progress, temperature)
    noise.advance()
    return mixture


def _exponential(logits: Tensor, noise: Noise) -> Tensor:
    return send(noise.draw(logits[0].numel()), logits.device).view(logits.shape)
