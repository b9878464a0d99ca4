"""Infinity's sampling: guidance, probabilities of bits, sampling of bits.

Shapes: B prompts, t tokens of a scale, C bits of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.core.devices import send
from kvbench.kernels import draw as counted
from kvbench.kernels.rms_norm import uses_triton
from kvbench.models.noise import CounterNoise, Noise


@dataclass(frozen=True)
class Sampling:
    """Sampling of bits (Infinity's inference; official defaults).

    Attributes:
        cfg: classifier-free guidance, one value or one per scale; 1 everywhere turns it off.
        tau: temperature, one value or one per scale.
        top_k: 1 is greedy; larger values have no effect, because a bit has two values.
        top_p: a bit value whose probability is at most 1 - top_p is never sampled.
        cfg_layers: where guidance acts: 0 on the logits, -n (less than the depth) on the hidden state after layer
            depth - n, layers counted from 0.
    """

    cfg: float | Sequence[float] = 3.0
    tau: float | Sequence[float] = 1.0
    top_k: int = 900
    top_p: float = 0.97
    cfg_layers: Sequence[int] = (0,)

    def __post_init__(self) -> None:
        for name, value in (("cfg", self.cfg), ("tau", self.tau)):
            if min([value] if isinstance(value, int | float) else value, default=0) <= 0:
                raise ValueError(f"model.sampling.{name}={value}: must be positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"model.sampling.top_p={self.top_p}: must be in (0, 1]")
        if self.top_k < 1:
            raise ValueError(f"model.sampling.top_k={self.top_k}: must be at least 1")

    def check_layers(self, depth: int) -> None:
        """Check `cfg_layers` against a transformer of `depth` layers.

        Raises:
            ValueError: `cfg_layers` is empty or names a layer that does not exist.
        """
        if not self.cfg_layers or not all(-depth < layer <= 0 for layer in self.cfg_layers):
            raise ValueError(
                f"model.sampling.cfg_layers={list(self.cfg_layers)}: list 0 (the logits) "
                f"or numbers from {1 - depth} to -1 (the layer that many before the end)"
            )

    def branches(self, scales: int) -> int:
        """Return the sequences per prompt: 2 if any scale is guided, else 1."""
        return 2 if any(cfg != 1 for cfg, _ in self.per_scale(scales)) else 1

    def per_scale(self, scales: int) -> tuple[tuple[float, float], ...]:
        """Return (cfg, tau) of every scale.

        Raises:
            ValueError: a per-scale list is shorter than the schedule.
        """
        columns = []
        for name, value in (("cfg", self.cfg), ("tau", self.tau)):
            column = [value] * scales if isinstance(value, int | float) else list(value)
            if len(column) < scales:
                raise ValueError(f"model.sampling.{name}: needs {scales} values, not {len(column)}")
            columns.append(column[:scales])
        return tuple(zip(*columns, strict=True))


def guide(x: Tensor, cfg: float) -> Tensor:
    """Return cfg x conditional + (1 - cfg) x unconditional of x [2 x B, t, channels], conditional rows first."""
    conditional, unconditional = x.chunk(2)
    return cfg * conditional + (1 - cfg) * unconditional


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return probabilities after top-k and top-p, float32 [..., 2], from logits [..., 2].

    The more probable value is never removed. If both are equally probable, greedy sampling takes 0, where the official
    code samples; a `top_p` of at most 1/2 leaves 1, as in the official code.
    """
    p = logits.float().softmax(-1)
    if sampling.top_k == 1:
        return torch.nn.functional.one_hot(p.argmax(-1), 2).float()
    rare = p <= 1 - sampling.top_p
    if sampling.top_p <= 0.5:
        zero, one = logits.unbind(-1)
        rare &= torch.stack((zero <= one, one < zero), -1)
    p = torch.where(rare, 0.0, p)
    return p / p.sum(-1, keepdim=True)


def draw_bits(logits: Tensor, sampling: Sampling, noise: Noise) -> Tensor:
    """Sample bits bool [B, t, C] from logits [B, t, C, 2].

    The bit is argmax p / q with q ~ Exp(1), which is how a single `torch.multinomial` draw works. With counter-based
    noise a bit needs one number: it is 1 if a uniform variable is below its probability.
    """
    if not isinstance(noise, CounterNoise):
        q = send(noise.draw(logits[0].numel()), logits.device).view(logits.shape)
        return (probabilities(logits, sampling) / q).argmax(-1).bool()
    if sampling.top_k == 1 or sampling.top_p <= 0.5:  # the probabilities are 0 and 1
        drawn = probabilities(logits, sampling)[..., 1] > 0
    elif uses_triton(logits):
        from kvbench.kernels.triton.draw import draw_bits_triton

        drawn = draw_bits_triton(logits, noise.keys, noise.step, 1 - sampling.top_p)
    else:
        drawn = counted.draw_bits(probabilities(logits, sampling)[..., 1], noise.keys, noise.step)
    noise.advance()
    return drawn
