"""Infinity's next-scale transformer with the bitwise head (arXiv:2412.04431), for every size from tiny to 8B.

Parameter names are those of the official checkpoints, so that loading can be strict.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvbench.core.segments import Segment
from kvbench.kernels.linear import linear
from kvbench.kernels.modulate import modulate
from kvbench.models.base import require_positive
from kvbench.models.infinity import rope
from kvbench.models.parts.cross_attention import PooledText
from kvbench.models.parts.decoder import RMSNorm
from kvbench.models.parts.layers import Block, HeadNorm, LayerCondition, init_linear, make_attend


@dataclass(frozen=True)
class InfinityConfig:
    """Shape of a transformer.

    Attributes:
        depth: layers.
        width: channels of the residual stream.
        heads: attention heads.
        block_chunks: groups the layers' parameter names fall into (part of the checkpoint format).
        text_width: channels of a text token.
        text_maxlen: rows of the learned unconditional text.
        token_channels: bits a token predicts (the tokenizer's bits, four times that with patchify).
        rope_grid: (rows, columns) that every scale's positions are stretched onto; None leaves it to the model, which
            takes that of its ratio.
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
            "depth",
            "width",
            "heads",
            "block_chunks",
            "token_channels",
            "text_width",
            "text_maxlen",
            "levels",
        )
        require_positive("model.transformer", **{name: getattr(self, name) for name in names})
        if self.width % (4 * self.heads):
            raise ValueError(
                f"model.transformer.width={self.width}: must be a multiple of 4 x heads={self.heads}, "
                "since rows and columns turn pairs of half a head each"
            )
        if self.depth % self.block_chunks:
            raise ValueError(
                f"model.transformer.block_chunks={self.block_chunks}: must divide depth={self.depth}"
            )

    @property
    def feed_forward(self) -> int:
        """Channels of the feed-forward layer."""
        return self.hidden or round(self.width * 4 / 256) * 256

    @property
    def pooling_heads(self) -> int:
        """Heads of the text pooling."""
        return self.pool_heads or self.text_width // (128 if self.width <= 4096 else 64)


@dataclass(frozen=True)
class Condition:
    """Tensors that the texts of a batch contribute to every scale.

    Attributes:
        start: pooled text [B, width], also the condition of the head's modulation.
        head: factor and shift of the head's norm, float32 [B, 1, width] each.
        layers: what each layer needs.
    """

    start: Tensor
    head: tuple[Tensor, Tensor]
    layers: tuple[LayerCondition, ...]


class Infinity(nn.Module):
    """The transformer: text and the running sum of codes in, bit logits out, one scale at a time or all at once.

    Attributes:
        layers: the blocks in order.
    """

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
        self.head_nm = HeadNorm(width)
        self.head = nn.Linear(width, 2 * config.token_channels)
        blocks = [Block(width, config.heads, config.feed_forward) for _ in range(config.depth)]
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
        """Dtype of the blocks, and of every linear layer the official program runs under autocast."""
        return self.layers[0].ffn.fc1.weight.dtype

    def rotation(self, segments: Sequence[Segment], device: torch.device | str) -> Tensor:
        """Return the rotations of all segments' tokens, complex64 [sum t_k, D/2].

        Raises:
            ValueError: the configuration names no grid.
        """
        config = self.config
        if config.rope_grid is None:
            raise ValueError(
                "model.transformer.rope_grid: name the (rows, columns) that positions are stretched onto"
            )
        return rope.compute_rotations(
            segments, config.rope_grid, config.width // config.heads, config.rope_base, device
        )

    def condition(self, values: Tensor, mask: Tensor) -> Condition:
        """Compute everything that depends on the text alone (values [B, words, text_width], mask bool [B, words])."""
        compute = self.compute
        values = self.text_norm(values)
        start = self.text_proj_for_sos["ca"](values, mask, compute)
        first, second = (layer for layer in self.text_proj_for_ca if isinstance(layer, nn.Linear))
        context = linear(values, first.weight, first.bias, compute, gelu=True)
        context = linear(context, second.weight, second.bias, compute)
        gss = self.shared_ada_lin(start.float()).unflatten(-1, (1, 6, -1))
        scale, shift = self.head_nm.ada_lin(start.float()).unflatten(-1, (1, 2, -1)).unbind(2)
        layers = tuple(block.condition(gss, context, mask) for block in self.layers)
        return Condition(start, (1 + scale, shift), layers)

    def embed(self, scale: int, condition: Condition, features: Tensor | None) -> Tensor:
        """Return the input of a scale: the start token for scale 0, else features [B, t_k, token_channels] embedded."""
        level = self.lvl_embed.weight[scale]
        if features is None:
            return condition.start[:, None] + self.pos_start + level
        x = linear(features, self.word_embed.weight, self.word_embed.bias, self.compute)
        return (x + level).to(x.dtype)

    def logits(self, x: Tensor, condition: Condition) -> Tensor:
        """Map hidden states [B, tokens, width] to float32 [B, tokens, 2 x bits]: channel 2j + v is bit j = v."""
        h = modulate(x, *condition.head, torch.float32)
        return linear(h, self.head.weight, self.head.bias, torch.float32)

    def forward(self, values: Tensor, mask: Tensor, features: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Run all scales in one pass, each token attending to its own and earlier scales.

        Args:
            values: text [B, words, text_width].
            mask: bool [B, words], which words exist.
            features: inputs of scales 1 and on, [B, sum t_k - t_0, token_channels].
            segments: the scales, a prefix of the schedule.

        Returns:
            Bit logits float32 [B, sum t_k, 2 x token_channels].
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
        """Set weights to train from: open gates, branches that start at zero, temperature 8, drawn from `generator`."""
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
