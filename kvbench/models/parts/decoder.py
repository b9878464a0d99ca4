"""The decoder of next-token models: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

It holds no keys and values: what is attended to is the caller's affair (`Cache.attend`), for a whole prompt as for one
token. Parameter names are those of LlamaGen's files. Rounding: everything is in the dtype of the weights, but for the
statistics of the norms, the rotation and the logits, which are float32 (the official program, cast as a whole).
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from kvbench.core.segments import ModelSpec, Segment, next_token_image
from kvbench.kernels.linear import linear
from kvbench.kernels.qk_norm_rope import HeadNorms, grouped_norm_rope
from kvbench.kernels.rms_norm import add_rms_norm, rms_norm
from kvbench.kernels.swiglu import silu_mul
from kvbench.models.base import require_positive
from kvbench.models.parts.layers import Attend
from kvbench.models.parts.rotary import rotate_grid, rotate_line

Add = Callable[[Tensor], Tensor]
"""Adds what the rest of a layer's heads or hidden channels gives, where other processes have them."""


def add_nothing(x: Tensor) -> Tensor:
    """Return x: the layer is whole."""
    return x


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder.

    Attributes:
        depth: layers.
        width: channels of the residual stream.
        heads: query heads.
        kv_heads: heads of keys and values, each shared by heads / kv_heads query heads that follow each other.
        head_dim: channels of a head.
        hidden: channels of the feed-forward's hidden layer.
        vocabulary: tokens there are.
        grid: rows and columns of the image that ends the sequence, whose tokens turn with both; None: tokens turn with
            their position.
        qk_norm: how queries and keys are normalised, each head by itself, before they turn: not at all, by `rms`
            (`RMSNorm`, one weight for all heads), or by `layer` (`HeadNorm`, weights and biases of every head).
        norm_after: the norms of attention and feed-forward are behind them instead of before.
        eps: of the norms.
        rope_base: of the rotary frequencies.
    """

    depth: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    grid: tuple[int, int] | None = None
    qk_norm: Literal["none", "rms", "layer"] = "none"
    norm_after: bool = False
    eps: float = 1e-5
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        names = ("depth", "width", "heads", "kv_heads", "head_dim", "hidden", "vocabulary")
        require_positive("model.transformer", **{name: getattr(self, name) for name in names})
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.transformer.kv_heads={self.kv_heads}: heads={self.heads} is no multiple of it"
            )
        even = 2 if self.grid is None else 4
        if self.head_dim % even:
            raise ValueError(f"model.transformer.head_dim={self.head_dim}: must be a multiple of {even}")

    def count_layer_bytes(self, tokens: int) -> int:
        """Return the most bytes that a layer works on at once on a GPU, in 16-bit numbers, for that many tokens."""
        number = 2
        joint = (self.heads + 2 * self.kv_heads) * self.head_dim
        attention = joint * 2 * number  # as projected, and as attended with
        stream = self.width * 4 * number  # the stream, its norm, what is added to it, and the sum
        return tokens * (stream + max(attention, 3 * number * self.hidden))

    @property
    def choices(self) -> int:
        """Tokens that can be drawn, the channels of the logits."""
        return self.vocabulary

    @property
    def line(self) -> int:
        """Tokens of a row of the image; 0 where texts are drawn."""
        return 0

    def describe(
        self, name: str, segments: tuple[Segment, ...], branches: int, *, equal_branches: bool = True
    ) -> ModelSpec:
        """Return what a cache and a method need to know of the decoder; see `ModelSpec` for the arguments."""
        shape = (self.depth, self.kv_heads, self.head_dim, segments, branches, self.head_dim**-0.5)
        return ModelSpec(
            name,
            *shape,
            equal_branches=equal_branches,
            line=self.line,
            group=self.heads // self.kv_heads,
            rope_base=0.0 if self.grid else self.rope_base,
        )

    def rotations(self, length: int) -> Tensor:
        """Return the rotations of a sequence of `length` tokens, complex64 [length, head_dim/2].

        With a `grid` the image's tokens are the last ones, and what comes before them is the condition
        (`rotary.rotate_grid`).
        """
        if self.grid is None:
            return rotate_line(length, self.head_dim, self.rope_base)
        before = length - self.grid[0] * self.grid[1]
        return rotate_grid(self.grid, self.head_dim, self.rope_base, before)


class ImageDecoderConfig(DecoderConfig):
    """Base class of shapes of decoders that draw images."""

    @property
    @abstractmethod
    def cells(self) -> tuple[int, int]:
        """Rows and columns of an image's codes."""

    @property
    def tokens(self) -> int:
        """Tokens of an image."""
        return self.cells[0] * self.line

    @property
    def line(self) -> int:
        """Tokens of a row."""
        return self.cells[1]

    def segments(self, prompt: int, chunk: int | None = None) -> tuple[Segment, ...]:
        """Return a prompt of so many tokens, then the image's tokens in segments of `chunk`, a row if None."""
        return next_token_image(prompt, self.tokens, self.line if chunk is None else chunk)

    def _check_cells(self, name: str) -> None:
        if min(self.cells) < 1 or self.tokens < 2:
            raise ValueError(
                f"model.transformer.{name}={list(self.cells)}: rows and columns of at least 2 tokens"
            )


class RMSNorm(nn.Module):
    """RMS norm over the channels (`kvbench.kernels.rms_norm`)."""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., channels] over the channels."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + h, or x where h is None, and its norm; all [..., channels]."""
        return (x, self(x)) if h is None else add_rms_norm(x, h, self.weight, self.eps)


class HeadNorm(nn.Module):
    """Weights of a layer norm of every head by itself, whose result is rotated before it is rounded.

    Weight and bias [heads x head_dim] are rows of the projection, as it were.
    """

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(heads * head_dim))
        self.bias = nn.Parameter(torch.zeros(heads * head_dim))


def _make_head_norm(config: DecoderConfig, heads: int) -> RMSNorm | HeadNorm:
    if config.qk_norm == "rms":
        return RMSNorm(config.head_dim, config.eps)
    return HeadNorm(heads, config.head_dim, config.eps)


class GroupedAttention(nn.Module):
    """Causal self-attention with one joint projection, rotation, and norms of queries and keys if there are any."""

    def __init__(self, config: DecoderConfig, add: Add = add_nothing) -> None:
        super().__init__()
        self.config, self.add = config, add
        joint = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.wqkv = nn.Linear(config.width, joint, bias=False)
        self.wo = nn.Linear(config.heads * config.head_dim, config.width, bias=False)
        if config.qk_norm != "none":
            both = (config.heads, config.kv_heads)
            self.q_norm, self.k_norm = (_make_head_norm(config, heads) for heads in both)

    @property
    def _norms(self) -> HeadNorms | None:
        if self.config.qk_norm == "none":
            return None
        q, k = self.q_norm, self.k_norm
        q_bias, k_bias = (norm.bias if isinstance(norm, HeadNorm) else None for norm in (q, k))
        return HeadNorms(q.weight, k.weight, q_bias, k_bias, self.config.eps)

    def forward(self, x: Tensor, layer: int, rotation: Tensor, attend: Attend) -> Tensor:
        """Attend from every current token; arguments are those of a block, x [B, tokens, width] after its norm."""
        config = self.config
        joint = linear(x, self.wqkv.weight, None).unflatten(-1, (-1, config.head_dim))
        heads = grouped_norm_rope(joint, config.kv_heads, self._norms, rotation)
        out = attend(layer, *heads, lambda: joint[:, :, : config.heads].transpose(1, 2))
        return self.add(linear(out.transpose(1, 2).flatten(2), self.wo.weight, None))


class SwiGLU(nn.Module):
    """Feed-forward w2(silu(w1 x) * w3 x) (arXiv:2002.05202)."""

    def __init__(self, width: int, hidden: int, add: Add = add_nothing) -> None:
        super().__init__()
        self.add = add
        self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, tokens, width] to [B, tokens, width]."""
        gated = silu_mul(linear(x, self.w1.weight, None), linear(x, self.w3.weight, None))
        return self.add(linear(gated, self.w2.weight, None))


class DecoderBlock(nn.Module):
    """Attention and feed-forward, each with a norm before it or behind it, added to the stream."""

    def __init__(self, config: DecoderConfig, add: Add = add_nothing) -> None:
        super().__init__()
        self.norm_after = config.norm_after
        self.attention = GroupedAttention(config, add)
        self.feed_forward = SwiGLU(config.width, config.hidden, add)
        self.attention_norm, self.ffn_norm = (RMSNorm(config.width, config.eps) for _ in range(2))

    def forward(
        self, x: Tensor, h: Tensor | None, layer: int, rotation: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Run the layer over the current tokens.

        What a branch gives is added where the next norm is taken, so that one kernel does both.

        Args:
            x: residual stream [B, tokens, width].
            h: what the layer before adds to it, shaped like x; None of the first layer.
            layer: index for `attend`.
            rotation: of the current tokens, complex64 [tokens, head_dim/2].
            attend: what is attended to (`kvbench.models.parts.layers.Attend`).

        Returns:
            The stream, and what this layer adds to it.
        """
        if self.norm_after:
            x = x if h is None else x + h
            x = x + self.attention_norm(self.attention(x, layer, rotation, attend))
            return x, self.ffn_norm(self.feed_forward(x))
        x, normed = self.attention_norm.add(x, h)
        x, normed = self.ffn_norm.add(x, self.attention(normed, layer, rotation, attend))
        return x, self.feed_forward(normed)


class Decoder(nn.Module):
    """Embedded tokens in, hidden states out, and their logits.

    Attributes:
        layers: the blocks in order.

    Args:
        config: its shape; of a share of it where processes split it (`kvbench.models.parts.tensor_parallel`).
        add: see `Add`.
    """

    def __init__(self, config: DecoderConfig, add: Add = add_nothing) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(DecoderBlock(config, add) for _ in range(config.depth))
        self.norm = RMSNorm(config.width, config.eps)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        """Run the current tokens [B, tokens, width] through all layers.

        Args:
            x: embedded tokens.
            rotation: their rows of `DecoderConfig.rotations`, complex64 [tokens, head_dim/2].
            attend: what is attended to.

        Returns:
            Residual stream [B, tokens, width], not yet normalised.
        """
        h = None
        for layer, block in enumerate(self.layers):
            x, h = block(x, h, layer, rotation, attend)
        return x if h is None else x + h

    def output_projection(self, layer: int) -> Tensor:
        """Return W_o of a layer, [width, query heads x head_dim]."""
        block = self.layers[layer]
        assert isinstance(block, DecoderBlock)
        return block.attention.wo.weight

    def rotations(self, length: int) -> Tensor:
        """Return the config's rotations of `length` tokens, complex64 [length, head_dim/2] beside the weights."""
        return self.config.rotations(length).to(self.norm.weight.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed drawn tokens int64 [...] as [..., width]."""
        return self.tok_embeddings(tokens)

    def logits(self, x: Tensor) -> Tensor:
        """Map residual streams [..., width] to logits float32 [..., vocabulary]."""
        return linear(self.norm(x), self.output.weight, None).float()
