"""Infinity's next-scale transformer with the bitwise head (arXiv:2412.04431), for every size from tiny to 8B.

Shapes: B sequences, T current tokens, t_k tokens of scale k, text [B, words, text_width] with a mask bool [B, words].
Parameters are named as in the official checkpoints, so that loading can be strict.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvbench.core.segments import Segment
from kvbench.kernels.linear import linear
from kvbench.kernels.modulate import modulate
from kvbench.models.base import refuse, require_sizes
from kvbench.models.infinity import rope
from kvbench.models.parts.cross_attention import PooledText
from kvbench.models.parts.decoder import RMSNorm
from kvbench.models.parts.layers import (
    AdaLNBeforeHead,
    InfinityBlock,
    LayerCondition,
    init_linear,
    make_attend,
)


@dataclass(frozen=True)
class InfinityConfig:
    """Shape of a transformer.

    Attributes:
        depth: layers.
        width: channels of the residual stream.
        heads: attention heads.
        block_chunks: number of groups in the layers' parameter names (part of the checkpoint format).
        text_width: channels of a text token.
        text_maxlen: rows of the learned unconditional text.
        token_channels: bits of a token (the tokenizer's bits, four times as many with patchify).
        rope_grid: (rows, columns) onto which positions of all scales are stretched; None for the model's aspect.
        rope_base: base of the rotary frequencies.
        levels: rows of the scale embedding.
        pool_heads: heads of the text pooling; 0 for the official rule.
        hidden: feed-forward channels; 0 for the official rule (4 x width to the nearest 256, halves to even).
    """

    depth: int
    width: int
    heads: int
    block_chunks: int
    token_channels: int
    text_width: int = 2048
    text_maxlen: int = 512
    rope_grid: tuple[int, int] | None = None
    rope_base: float = 10_000.0
    levels: int = 15
    pool_heads: int = 0
    hidden: int = 0

    def __post_init__(self) -> None:
        names = (
            "depth", "width", "heads", "block_chunks", "token_channels", "text_width", "text_maxlen", "levels",
        )  # fmt: skip
        require_sizes("model.transformer", self, *names)
        heads = self.pooling_heads
        refuse(
            "model.transformer",
            self,
            rope_base=(self.rope_base <= 0, "be positive"),
            hidden=(self.hidden < 0, "not be negative (0: the official rule)"),
            pool_heads=(
                heads < 1 or self.width % heads > 0,
                f"give a number that divides width={self.width}, not {heads}",
            ),
        )
        if self.width % (4 * self.heads):
            raise ValueError(
                f"model.transformer.width={self.width}: must be a multiple of 4 x heads={self.heads}, "
                "since rows and columns rotate pairs of half a head each"
            )
        if self.depth % self.block_chunks:
            raise ValueError(
                f"model.transformer.block_chunks={self.block_chunks}: must divide depth={self.depth}"
            )

    @property
    def feed_forward(self) -> int:
        """Number of hidden channels of the feed-forward layer."""
        return self.hidden or round(self.width * 4 / 256) * 256

    @property
    def pooling_heads(self) -> int:
        """Number of heads of the attention that pools the text."""
        return self.pool_heads or self.text_width // (128 if self.width <= 4096 else 64)


@dataclass(frozen=True)
class TextCondition:
    """Tensors of a batch's texts that all scales share.

    Attributes:
        start: pooled text [B, width], also the condition of the head's modulation.
        head: factor and shift of the head's norm, float32 [B, 1, width] each.
        layers: tensors of each layer.
    """

    start: Tensor
    head: tuple[Tensor, Tensor]
    layers: tuple[LayerCondition, ...]


class Infinity(nn.Module):
    """Transformer from text and the running sum of codes to bit logits, one scale at a time or all at once."""

    def __init__(self, config: InfinityConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.cfg_uncond = nn.Parameter(torch.zeros(config.text_maxlen, config.text_width))
        self.pos_start = nn.Parameter(torch.zeros(1, 1, width))
        self.text_norm = RMSNorm(config.text_width, 1e-6)
        pooled = PooledText(config.text_width, width, config.pooling_heads)
        self.text_proj_for_sos = nn.ModuleDict({"ca": pooled})
        self.text_proj_for_ca = nn.Sequential(
            nn.Linear(config.text_width, width), nn.GELU(approximate="tanh"), nn.Linear(width, width)
        )
        self.lvl_embed = nn.Embedding(config.levels, width)
        self.word_embed = nn.Linear(config.token_channels, width)
        self.shared_ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.head_nm = AdaLNBeforeHead(width)
        self.head = nn.Linear(width, 2 * config.token_channels)
        blocks = [InfinityBlock(width, config.heads, config.feed_forward) for _ in range(config.depth)]
        self.layers = tuple(blocks)
        per_chunk = config.depth // config.block_chunks
        if config.block_chunks == 1:
            self.blocks = nn.ModuleList(blocks)
        else:
            self.block_chunks = nn.ModuleList(
                nn.ModuleDict({"module": nn.ModuleList(blocks[i : i + per_chunk])})
                for i in range(0, config.depth, per_chunk)
            )

    @property
    def compute(self) -> torch.dtype:
        """Dtype of the blocks and of the linear layers that the official code runs under autocast."""
        return self.layers[0].ffn.fc1.weight.dtype

    def rotation(self, segments: Sequence[Segment], device: torch.device | str) -> Tensor:
        """Return the rotations of all segments' tokens, complex64 [sum t_k, D/2].

        Raises:
            ValueError: the configuration has no grid.
        """
        config = self.config
        if config.rope_grid is None:
            raise ValueError(
                "model.transformer.rope_grid: missing; set it to the (rows, columns) onto which positions are stretched"
            )
        return rope.compute_rotations(
            segments, config.rope_grid, config.width // config.heads, config.rope_base, device
        )

    def condition(self, values: Tensor, mask: Tensor) -> TextCondition:
        """Compute the tensors that depend on the text alone, from its features and their mask."""
        compute = self.compute
        values = self.text_norm(values)
        start = self.text_proj_for_sos["ca"](values, mask, compute)
        first, second = (layer for layer in self.text_proj_for_ca if isinstance(layer, nn.Linear))
        context = linear(values, first.weight, first.bias, compute, gelu=True)
        context = linear(context, second.weight, second.bias, compute)
        gss = self.shared_ada_lin(start.float()).unflatten(-1, (1, 6, -1))
        scale, shift = self.head_nm.ada_lin(start.float()).unflatten(-1, (1, 2, -1)).unbind(2)
        layers = tuple(block.condition(gss, context, mask) for block in self.layers)
        return TextCondition(start, (1 + scale, shift), layers)

    def embed(self, scale: int, condition: TextCondition, features: Tensor | None) -> Tensor:
        """Return the input of a scale: the start token for scale 0, else embedded features [B, t_k, token_channels]."""
        level = self.lvl_embed.weight[scale]
        if features is None:
            return condition.start[:, None] + self.pos_start + level
        x = linear(features, self.word_embed.weight, self.word_embed.bias, self.compute)
        return (x + level).to(x.dtype)

    def logits(self, x: Tensor, condition: TextCondition) -> Tensor:
        """Map hidden states [B, T, width] to float32 [B, T, 2 x bits], where channel 2j + v is for bit j = v."""
        h = modulate(x, *condition.head, torch.float32)
        return linear(h, self.head.weight, self.head.bias, torch.float32)

    def forward(self, values: Tensor, mask: Tensor, features: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Run a prefix of the schedule in one pass and return bit logits float32 [B, sum t_k, 2 x token_channels].

        Tokens attend to their own and earlier scales. `features` are the inputs of scales from 1 on,
        [B, sum t_k - t_0, token_channels].
        """
        condition = self.condition(values, mask)
        lengths = [segment.length for segment in segments]
        parts: list[Tensor | None] = [None, *features.split(lengths[1:], 1)]
        x = torch.cat([self.embed(k, condition, part) for k, part in enumerate(parts[: len(segments)])], 1)
        rotation = self.rotation(segments, x.device)

        attend = make_attend(segments)
        for layer, block in enumerate(self.layers):
            x = block(x, layer, condition.layers[layer], rotation, attend)
        return self.logits(x, condition)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise weights for training: open gates, branches that start at zero, temperature 8."""
        init_linear(self, generator)
        for parameter in (
            self.cfg_uncond,
            self.pos_start,
            self.text_proj_for_sos["ca"].get_parameter("mat_q"),
        ):
            parameter.normal_(0, 0.5, generator=generator)
        self.lvl_embed.weight.normal_(0, 0.3, generator=generator)
        for modulation in (self.shared_ada_lin[1], self.head_nm.ada_lin[1]):
            assert isinstance(modulation, nn.Linear)
            modulation.weight.mul_(0.1)
            modulation.bias.zero_()
        self.head.weight.mul_(0.1)
        for block in self.layers:
            block.sa.proj.weight.zero_()
            block.ca.proj.weight.zero_()
            block.ffn.fc2.weight.zero_()
            block.ada_gss[:, :, :2] = 1.0
            block.sa.scale_mul_1H11.fill_(8.0).log_()
