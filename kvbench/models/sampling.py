"""Sampling settings, per-prompt noise, and the choice of bits."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MANY = 2**16
"""Numbers of one prompt that take longer to draw than a thread to start."""


@dataclass(frozen=True)
class Sampling:
    """How bits are drawn (Infinity inference; official defaults).

    Attributes:
        cfg: classifier-free guidance, one for all scales or one per scale; 1 everywhere turns it off.
        tau: temperature, likewise.
        top_k: 1 is greedy; with two classes per bit anything above is no restriction.
        top_p: a bit value whose probability is at most 1 - top_p is never drawn.
        cfg_layers: where guidance acts: 0 on the logits, -n on the hidden state after layer depth - n.
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
            raise ValueError(f"model.sampling.top_p={self.top_p}: must lie in (0, 1]")
        if self.top_k < 1:
            raise ValueError(f"model.sampling.top_k={self.top_k}: must be at least 1")

    def branches(self, scales: int) -> int:
        """Sequences per prompt: 2 if any scale is guided."""
        return 2 if any(cfg != 1 for cfg, _ in self.per_scale(scales)) else 1

    def per_scale(self, scales: int) -> tuple[tuple[float, float], ...]:
        """(cfg, tau) of every scale.

        Raises:
            ValueError: a per-scale list is shorter than the schedule.
        """
        columns = []
        for name, value in (("cfg", self.cfg), ("tau", self.tau)):
            column = [value] * scales if isinstance(value, int | float) else list(value)
            if len(column) < scales:
                raise ValueError(f"model.sampling.{name}: {len(column)} values for {scales} scales")
            columns.append(column[:scales])
        return tuple(zip(*columns, strict=True))


class Noise(Protocol):
    """Where a batch's randomness comes from."""

    def draw(self, count: int) -> Tensor:
        """Exp(1) variables float32 [prompts, count], the next of each prompt's stream, on the CPU."""
        ...


class PromptNoise:
    """One generator per prompt, seeded by (seed, prompt index): the same noise in any batch, shard or method."""

    def __init__(self, seed: int, indices: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(prompt_seed(seed, index)) for index in indices]

    def draw(self, count: int) -> Tensor:
        """Exp(1) variables float32 [prompts, count]; many of them at a time in threads, for a GPU may be waiting."""

        def row(generator: torch.Generator) -> Tensor:
            return torch.empty(count).exponential_(generator=generator)

        if count < MANY or len(self._generators) == 1:
            return torch.stack([row(generator) for generator in self._generators])
        with ThreadPoolExecutor(min(len(self._generators), os.cpu_count() or 1)) as threads:
            return torch.stack(list(threads.map(row, self._generators)))


def prompt_seed(seed: int, index: int) -> int:
    """Seed of one prompt's generator: 63 bits of SHA-256, so that neighbouring prompts share nothing."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities after top-k and top-p, float32 [..., 2] from logits [..., 2]."""
    p = logits.float().softmax(-1)
    if sampling.top_k == 1:
        return torch.nn.functional.one_hot(p.argmax(-1), 2).float()
    p = torch.where(p <= 1 - sampling.top_p, 0.0, p)
    return p / p.sum(-1, keepdim=True)


def choose(logits: Tensor, sampling: Sampling, noise: Noise) -> Tensor:
    """Draws bits bool [prompts, tokens, channels] from logits [prompts, tokens, channels, 2].

    The drawn class is argmax p / q with q ~ Exp(1), which is how a single `torch.multinomial` draw works.
    """
    q = noise.draw(logits[0].numel()).to(logits.device).view(logits.shape)
    return (probabilities(logits, sampling) / q).argmax(-1).bool()
