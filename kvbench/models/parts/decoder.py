"""The decoder of next-token models: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

It stores no keys and values: the caller supplies the attention function (`Cache.attend`). Shapes: B sequences, T
current tokens, residual stream x [B, T, width]. Parameters are named as in LlamaGen's files. Rounding: everything uses
the weights' dtype, except statistics of norms, rotation and logits, which are float32.
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
from kvbench.models.base import refuse, require_sizes
from kvbench.models.parts.layers import Attend
from kvbench.models.parts.rotary import rotate_grid, rotate_line

Add = Callable[[Tensor], Tensor]
"""Sums a layer's output over the processes that share its heads or hidden channels."""

SPECIAL = 6
"""Number of special tokens, neither text tokens nor image codes, in the frame of a prompt and its image."""


def add_nothing(x: Tensor) -> Tensor:
    """Return x, for a layer that one process holds."""
    return x


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder.

    Attributes:
        depth: layers.
        width: channels of the residual stream.
        heads: query heads.
        kv_heads: heads of keys and values, each shared by heads / kv_heads consecutive query heads.
        head_dim: channels of a head.
        hidden: channels of the feed-forward's hidden layer.
        vocabulary: number of distinct tokens.
        grid: rows and columns of the image that ends the sequence, which rotate its tokens; None to rotate tokens by
            their position.
        qk_norm: norm of each head's queries and keys before rotation: `none`, `rms` (`RMSNorm`, one weight for all
            heads) or `layer` (`PerHeadNorm`, weight and bias of each head).
        norm_after: whether the norms of attention and feed-forward follow them instead of preceding them.
        eps: epsilon of the norms.
        rope_base: base of the rotary frequencies.
        qkv_bias: whether the projections of queries, keys and values have a bias.
        unrotated: indices of the layers whose queries and keys do not rotate.
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
    qkv_bias: bool = False
    unrotated: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names = ("depth", "width", "heads", "kv_heads", "head_dim", "hidden", "vocabulary")
        require_sizes("model.transformer", self, *names)
        rules = {"eps": (self.eps < 0, "not be negative"), "rope_base": (self.rope_base <= 0, "be positive")}
        refuse("model.transformer", self, **rules)
        if self.heads % self.kv_heads:
            raise ValueError(f"model.transformer.kv_heads={self.kv_heads}: must divide heads={self.heads}")
        even = 2 if self.grid is None else 4
        if self.head_dim % even:
            raise ValueError(f"model.transformer.head_dim={self.head_dim}: must be a multiple of {even}")

    def count_layer_bytes(self, tokens: int) -> int:
        """Return a layer's peak bytes on a GPU for `tokens` tokens of 16-bit values."""
        element = 2
        joint = (self.heads + 2 * self.kv_heads) * self.head_dim
        attention = joint * 2 * element  # projected, and normalised and rotated
        stream = self.width * 4 * element  # the stream, its norm, a branch's output, and the sum
        return tokens * (stream + max(attention, 3 * element * self.hidden))

    @property
    def choices(self) -> int:
        """Number of tokens that can be sampled: the channels of the logits."""
        return self.vocabulary

    @property
    def line(self) -> int:
        """Tokens of a row of the image; 0 for texts."""
        return 0

    def describe(
        self, name: str, segments: tuple[Segment, ...], branches: int, *, equal_branches: bool = True
    ) -> ModelSpec:
        """Return the shapes for caches and methods; see `ModelSpec` for the arguments."""
        shape = (self.depth, self.kv_heads, self.head_dim, segments, branches, self.head_dim**-0.5)
        return ModelSpec(
            name,
            *shape,
            equal_branches=equal_branches,
            line=self.line,
            group=self.heads // self.kv_heads,
            rope_base=0.0 if self.grid else self.rope_base,
            unrotated=self.unrotated,
        )

    def rotations(self, length: int) -> Tensor:
        """Return the rotations of a sequence of `length` tokens, complex64 [length, head_dim/2].

        With a `grid` the last tokens are the image's and the first ones the condition's (`rotary.rotate_grid`).
        """
        if self.grid is None:
            return rotate_line(length, self.head_dim, self.rope_base)
        before = length - self.grid[0] * self.grid[1]
        return rotate_grid(self.grid, self.head_dim, self.rope_base, before)


class ImageDecoderConfig(DecoderConfig):
    """Base class of shapes of decoders that generate images."""

    @property
    @abstractmethod
    def cells(self) -> tuple[int, int]:
        """Rows and columns of an image's codes."""

    @property
    def tokens(self) -> int:
        """Number of tokens of an image."""
        return self.cells[0] * self.line

    @property
    def line(self) -> int:
        """Number of tokens of a row of the image."""
        return self.cells[1]

    def segments(self, prompt: int, chunk: int | None = None) -> tuple[Segment, ...]:
        """Return a segment of `prompt` tokens, then the image's tokens in segments of `chunk`, or of a row if None."""
        return next_token_image(prompt, self.tokens, self.line if chunk is None else chunk)

    def _check_cells(self, name: str) -> None:
        if min(self.cells) < 1 or self.tokens < 2:
            raise ValueError(
                f"model.transformer.{name}={list(self.cells)}: must be rows and columns with at least 2 tokens"
            )


@dataclass(frozen=True, kw_only=True)
class PromptedImageConfig(ImageDecoderConfig):
    """Base class of shapes of decoders whose prompts are tokens too.

    Attributes:
        image: rows and columns of image codes.
        codes: number of image codes.
    """

    image: tuple[int, int]
    codes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes("model.transformer", self, "codes")

    @property
    def cells(self) -> tuple[int, int]:
        """Rows and columns of an image's codes."""
        return self.image


@dataclass(frozen=True, kw_only=True)
class LinedImageConfig(PromptedImageConfig):
    """Shape of a language model that generates images; `vocabulary` counts image tokens too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocabulary <= self.codes + SPECIAL:
            raise ValueError(
                f"model.transformer.vocabulary={self.vocabulary}: codes={self.codes} and {SPECIAL} special tokens "
                "leave no text tokens; raise it"
            )

    @property
    def line(self) -> int:
        """Tokens of a line, its codes and a newline; the last line has a newline too."""
        return self.image[1] + 1


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
        """Return x + h, or x if h is None, and its norm; all [..., channels]."""
        return (x, self(x)) if h is None else add_rms_norm(x, h, self.weight, self.eps)


class PerHeadNorm(nn.Module):
    """Parameters of a layer norm over each head's channels; weight and bias are [heads x head_dim].

    `grouped_norm_rope` rotates the result before rounding it.
    """

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(heads * head_dim))
        self.bias = nn.Parameter(torch.zeros(heads * head_dim))


def _make_head_norm(config: DecoderConfig, heads: int) -> RMSNorm | PerHeadNorm:
    if config.qk_norm == "rms":
        return RMSNorm(config.head_dim, config.eps)
    return PerHeadNorm(heads, config.head_dim, config.eps)


class GroupedAttention(nn.Module):
    """Causal self-attention with a joint projection, rotation, and optional norms of queries and keys."""

    def __init__(self, config: DecoderConfig, add: Add = add_nothing) -> None:
        super().__init__()
        self.config, self.add = config, add
        joint = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.wqkv = nn.Linear(config.width, joint, bias=config.qkv_bias)
        self.wo = nn.Linear(config.heads * config.head_dim, config.width, bias=False)
        if config.qk_norm != "none":
            counts = (config.heads, config.kv_heads)
            self.q_norm, self.k_norm = (_make_head_norm(config, heads) for heads in counts)

    @property
    def _norms(self) -> HeadNorms | None:
        if self.config.qk_norm == "none":
            return None
        q, k = self.q_norm, self.k_norm
        q_bias, k_bias = (norm.bias if isinstance(norm, PerHeadNorm) else None for norm in (q, k))
        return HeadNorms(q.weight, k.weight, q_bias, k_bias, self.config.eps)

    def forward(self, x: Tensor, layer: int, rotation: Tensor, attend: Attend) -> Tensor:
        """Map normalised x [B, T, width] to an output of this shape; other arguments as in `DecoderBlock.forward`."""
        config, projection = self.config, self.wqkv
        joint = linear(x, projection.weight, projection.bias).unflatten(-1, (-1, config.head_dim))
        heads = grouped_norm_rope(joint, config.kv_heads, self._norms, rotation)

        def project_queries() -> Tensor:
            """Return the queries before bias, norm and rotation, [B, heads, T, head_dim]."""
            if projection.bias is None:
                return joint[:, :, : config.heads].transpose(1, 2)
            rows = projection.weight[: config.heads * config.head_dim]
            return linear(x, rows, None).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)

        out = attend(layer, *heads, project_queries)
        return self.add(linear(out.transpose(1, 2).flatten(2), self.wo.weight, None))


class SwiGLU(nn.Module):
    """Feed-forward w2(silu(w1 x) * w3 x) (arXiv:2002.05202)."""

    def __init__(self, width: int, hidden: int, add: Add = add_nothing) -> None:
        super().__init__()
        self.add = add
        self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, width, bias=False)
        self._joint: Tensor | None = None

    def join(self) -> None:
        """Store w1 and w3 as the halves of one matrix [2 hidden, width], so that one product computes both."""
        both = (self.w1, self.w3)
        self._joint = torch.cat([layer.weight.detach() for layer in both])
        for layer, half in zip(both, self._joint.chunk(2), strict=True):
            layer.weight = nn.Parameter(half, requires_grad=layer.weight.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, width] to [B, T, width]."""
        if self._joint is None:
            gate, factor = linear(x, self.w1.weight, None), linear(x, self.w3.weight, None)
        else:
            gate, factor = linear(x, self._joint, None).chunk(2, -1)
        gated = silu_mul(gate, factor)
        return self.add(linear(gated, self.w2.weight, None))


class DecoderBlock(nn.Module):
    """Attention and feed-forward, each with a norm before or after it, added to the stream."""

    def __init__(self, config: DecoderConfig, add: Add = add_nothing) -> None:
        super().__init__()
        self.norm_after = config.norm_after
        self.attention = GroupedAttention(config, add)
        self.feed_forward = SwiGLU(config.width, config.hidden, add)
        self.attention_norm, self.ffn_norm = (RMSNorm(config.width, config.eps) for _ in range(2))

    def forward(
        self, x: Tensor, h: Tensor | None, layer: int, rotation: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Run the layer and return the stream and the feed-forward's output, which is not yet added to it.

        The next layer adds it; unless norms follow their branches, one kernel adds it and computes the norm.

        Args:
            x: residual stream [B, T, width].
            h: output of the previous layer's feed-forward, shaped like x; None for the first layer.
            layer: index for `attend`.
            rotation: complex64 [T, head_dim/2] of the current tokens.
            attend: attention function (`kvbench.models.parts.layers.Attend`).
        """
        if self.norm_after:
            x = x if h is None else x + h
            x = x + self.attention_norm(self.attention(x, layer, rotation, attend))
            return x, self.ffn_norm(self.feed_forward(x))
        x, normed = self.attention_norm.add(x, h)
        x, normed = self.ffn_norm.add(x, self.attention(normed, layer, rotation, attend))
        return x, self.feed_forward(normed)


class Decoder(nn.Module):
    """Network from embedded tokens to hidden states and logits.

    Args:
        config: shape of the decoder, or of a process's share (`kvbench.models.parts.tensor_parallel`).
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
        """Run embedded tokens [B, T, width] through all layers and return the residual stream, not yet normalised.

        `rotation` has the tokens' rows of `DecoderConfig.rotations`, complex64 [T, head_dim/2].
        """
        h, unrotated = None, self.config.unrotated
        identity = torch.ones_like(rotation) if unrotated else rotation
        for layer, block in enumerate(self.layers):
            x, h = block(x, h, layer, identity if layer in unrotated else rotation, attend)
        return x if h is None else x + h

    def prepare_for(self, device: torch.device | str) -> None:
        """Prepare filled weights for a device: on a GPU one matrix product computes w1 and w3 of a layer.

        On a CPU a product of another size may round differently, so that w1 and w3 stay separate.
        """
        if torch.device(device).type == "cuda":
            for module in self.modules():
                if isinstance(module, SwiGLU):
                    module.join()

    def rotations(self, length: int) -> Tensor:
        """Return the rotations of `length` tokens, complex64 [length, head_dim/2], on the weights' device."""
        return self.config.rotations(length).to(self.norm.weight.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens int64 [...] as [..., width]."""
        return self.tok_embeddings(tokens)

    def logits(self, x: Tensor) -> Tensor:
        """Map residual streams [..., width] to logits float32 [..., vocabulary]."""
        return linear(self.norm(x), self.output.weight, None).float()
