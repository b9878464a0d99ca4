"""A small next-token decoder of random weights to measure the cache by: RMSNorm, rotation, grouped queries, SwiGLU.

It runs over any cache that has `attend`: kvbench's, or `PlainCache`, which does what ordinary inference code does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.segments import ModelSpec, Segment, next_token
from kvbench.kernels.qk_norm_rope import rotate
from kvbench.models.base import Cache


@dataclass(frozen=True)
class Shape:
    """Sizes of the decoder.

    Attributes:
        layers: decoder layers.
        heads: KV heads.
        groups: query heads per KV head.
        head_dim: channels per head.
        vocabulary: tokens there are.
        prompt: tokens of the prompt, the first segment.
        rows: tokens of each later segment.
    """

    layers: int = 4
    heads: int = 4
    groups: int = 2
    head_dim: int = 32
    vocabulary: int = 256
    prompt: int = 16
    rows: tuple[int, ...] = (16,) * 32

    @property
    def width(self) -> int:
        """Channels of the residual stream."""
        return self.heads * self.groups * self.head_dim

    @property
    def spec(self) -> ModelSpec:
        """The decoder as caches and methods see it, without guidance."""
        segments = next_token(self.prompt, self.rows)
        scale = self.head_dim**-0.5
        return ModelSpec("decoder", self.layers, self.heads, self.head_dim, segments, 1, scale)


class Decoder:
    """Random weights in a decoder's shape.

    Args:
        shape: sizes.
        seed: of the weights.
    """

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(out: int, into: int, gain: float = 1.0) -> Tensor:
            return torch.randn(out, into, generator=generator) * gain * into**-0.5

        width, keys = shape.width, shape.heads * shape.head_dim
        self.shape = shape
        self.embedding = torch.randn(shape.vocabulary, width, generator=generator)
        self.head = weight(shape.vocabulary, width)
        self.layers = [
            {
                "qkv": weight(width + 2 * keys, width, 2.0),
                "out": weight(width, width),
                "gate_up": weight(4 * width, width),
                "down": weight(width, 2 * width),
            }
            for _ in range(shape.layers)
        ]
        length = shape.spec.segments[-1].end
        frequencies = 10000.0 ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.arange(length)[:, None] * frequencies
        self.rotation = torch.polar(torch.ones_like(angles), angles)

    def step(self, tokens: Tensor, position: int, cache: Cache) -> Tensor:
        """Run tokens int64 [sequences, n] from `position` on; return their logits [sequences, n, vocabulary]."""
        shape = self.shape
        x = self.embedding[tokens]
        rotation = self.rotation[position : position + tokens.shape[1], None]
        for layer, weights in enumerate(self.layers):
            heads = F.linear(_normalise(x), weights["qkv"]).unflatten(-1, (-1, shape.head_dim))
            q, k, v = heads.split((shape.heads * shape.groups, shape.heads, shape.heads), 2)
            q, k = (rotate(one, rotation).transpose(1, 2) for one in (q, k))
            out = cache.attend(layer, q, k, v.transpose(1, 2))
            x = x + F.linear(out.transpose(1, 2).flatten(2), weights["out"])
            gate, up = F.linear(_normalise(x), weights["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, weights["down"])
        return F.linear(_normalise(x), self.head)

    @torch.inference_mode()
    def generate(self, prompts: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """Generate greedily after prompts int64 [sequences, prompt].

        Returns:
            Tokens int64 [sequences, all but the prompt's], and the logits float32 [sequences, tokens, vocabulary] that
            each was chosen by.
        """
        cache.reset(len(prompts))
        tokens, found = prompts, []
        position = 0
        for segment in self.shape.spec.segments:
            cache.begin(segment)
            steps = 1 if segment.index == 0 else segment.length
            for _ in range(steps):
                logits = self.step(tokens, position, cache)[:, -1:]
                position += tokens.shape[1]
                tokens = logits.argmax(-1)
                found.append(logits)
        logits = torch.cat(found[:-1], 1)
        return logits.argmax(-1), logits


class PlainCache:
    """Keys and values that grow by `torch.cat`, and torch's own attention: what ordinary inference code does."""

    def reset(self, sequences: int) -> None:
        """Drop everything."""
        self._past: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, segment: Segment) -> None:
        """Segments do not matter here."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend causally over everything so far; scaled by 1/sqrt(D)."""
        tokens = k.shape[2]
        if layer in self._past:
            k, v = (torch.cat((past, new), 2) for past, new in zip(self._past[layer], (k, v), strict=True))
        self._past[layer] = (k, v)
        seen = (
            torch.ones(tokens, k.shape[2], dtype=torch.bool).tril(k.shape[2] - tokens) if tokens > 1 else None
        )
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def random_prompts(shape: Shape, sequences: int, seed: int = 0) -> Tensor:
    """Draw prompts int64 [sequences, prompt]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.vocabulary, (sequences, shape.prompt), generator=generator)


def rows_of(tokens: int, length: int) -> tuple[int, ...]:
    """Return the lengths of segments of `length` tokens that hold `tokens` together."""
    whole: Sequence[int] = [length] * (tokens // length)
    return (*whole, tokens % length) if tokens % length else tuple(whole)


def _normalise(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])
