"""VAR's class-conditional next-scale transformer (arXiv:2404.02905), for every published size.

Shapes: B sequences, T current tokens, t_k tokens of scale k. Parameters are named as in the official checkpoints, so
that loading can be strict. Rounding: blocks and the linear layers around them compute in the dtype of the blocks'
linear layers; residual stream, norms, temperatures and logits are float32, as in the official code under autocast.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.core.segments import Segment, next_scale
from kvbench.kernels.linear import linear
from kvbench.kernels.modulate import modulate
from kvbench.models.base import require_sizes
from kvbench.models.parts.layers import (
    AdaLNBeforeHead,
    Attend,
    FeedForward,
    Modulation,
    Projection,
    SelfAttention,
    add_gated,
    init_linear,
    make_attend,
)


@dataclass(frozen=True)
class VARConfig:
    """Shape of a transformer.

    Attributes:
        depth: layers.
        width: channels of the residual stream.
        heads: attention heads.
        sides: the scale schedule, whose scales are squares of side x side tokens.
        classes: number of classes; the embedding has one more row for no class.
        codes: entries of the tokenizer's codebook.
        channels: channels of a code.
        shared_aln: whether all layers share one modulation, plus a learned offset in each (the 512-pixel model).
    """

    depth: int
    width: int
    heads: int
    sides: tuple[int, ...]
    classes: int = 1000
    codes: int = 4096
    channels: int = 32
    shared_aln: bool = False

    def __post_init__(self) -> None:
        require_sizes("model.transformer", self, "depth", "width", "heads", "classes", "codes", "channels")
        if len(self.sides) < 2 or min(self.sides) < 1:
            raise ValueError(
                f"model.transformer.sides={list(self.sides)}: must have at least 2 scales, of sides of at least 1"
            )
        if self.width % self.heads:
            raise ValueError(
                f"model.transformer.width={self.width}: must be a multiple of heads={self.heads}"
            )

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Segments of an image: its scales."""
        return next_scale([(side, side) for side in self.sides])


@dataclass(frozen=True)
class ClassCondition:
    """Tensors of a batch's classes that all scales share.

    Attributes:
        start: class embedding float32 [B, width].
        modulation: modulation of each layer.
        projections: projection of each layer's self-attention.
        head: factor and shift of the head's norm, [B, 1, width] each.
    """

    start: Tensor
    modulation: tuple[Modulation, ...]
    projections: tuple[Projection, ...]
    head: tuple[Tensor, Tensor]


class VARBlock(nn.Module):
    """Self-attention and feed-forward, modulated and gated by the class."""

    def __init__(self, width: int, heads: int, *, shared_aln: bool) -> None:
        super().__init__()
        self.attn = SelfAttention(width, heads)
        self.ffn = FeedForward(width, 4 * width)
        if shared_aln:
            self.ada_gss = nn.Parameter(torch.zeros(1, 1, 6, width))
        else:
            self.ada_lin = _modulation(width)

    def modulation(self, start: Tensor, shared: Tensor | None) -> Tensor:
        """Compute [B, 1, 6, width] from the classes float32 [B, width], or from the shared modulation."""
        if shared is not None:
            return self.ada_gss + shared
        return _modulate(self.ada_lin, start, self.ffn.fc1.weight.dtype)

    def forward(
        self, x: Tensor, layer: int, modulation: Modulation, projection: Projection, attend: Attend
    ) -> Tensor:
        """Run the layer over the current tokens; without gradients x, float32 [B, T, width], is overwritten."""
        gate1, gate2, factor1, factor2, shift1, shift2 = modulation
        dtype = self.ffn.fc1.weight.dtype
        modulated = partial(modulate, x, factor1, shift1, dtype)
        x = add_gated(x, self.attn(modulated, layer, projection, None, attend), gate1, rounded=True)
        # The official code does not multiply in place: the gate's dtype decides, float32 with shared modulation.
        rounded = gate2.dtype == dtype
        return add_gated(x, self.ffn(modulate(x, factor2, shift2, dtype)), gate2, rounded=rounded)


def is_rounded(name: str) -> bool:
    """Return whether a parameter of `VAR` has the blocks' dtype.

    Temperatures and offsets of the shared modulation stay float32, because the official code never casts them.
    """
    return name.startswith("blocks.") and not name.endswith(("scale_mul_1H11", "ada_gss"))


class VAR(nn.Module):
    """Transformer from a class and the running sum of codes to logits of codes, one scale at a time or all at once."""

    def __init__(self, config: VARConfig) -> None:
        super().__init__()
        self.config = config
        width, segments = config.width, config.segments
        self.pos_start = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_1LC = nn.Parameter(torch.zeros(1, segments[-1].end, width))
        self.word_embed = nn.Linear(config.channels, width)
        self.class_emb = nn.Embedding(config.classes + 1, width)
        self.lvl_embed = nn.Embedding(len(segments), width)
        blocks = [VARBlock(width, config.heads, shared_aln=config.shared_aln) for _ in range(config.depth)]
        self.layers = tuple(blocks)
        self.blocks = nn.ModuleList(blocks)
        if config.shared_aln:
            self.shared_ada_lin = _modulation(width)
        self.head_nm = AdaLNBeforeHead(width)
        self.head = nn.Linear(width, config.codes)

    @property
    def compute(self) -> torch.dtype:
        """Dtype of the blocks and of the linear layers that the official code runs under autocast."""
        return self.layers[0].ffn.fc1.weight.dtype

    def condition(self, labels: Tensor) -> ClassCondition:
        """Compute the tensors that depend on the classes alone (int64 [B]; `config.classes` is not a class)."""
        start, compute = self.class_emb(labels), self.compute
        shared = _modulate(self.shared_ada_lin, start, compute).float() if self.config.shared_aln else None
        modulation = tuple(Modulation.split(block.modulation(start, shared)) for block in self.layers)
        scale, shift = _modulate(self.head_nm.ada_lin, start, compute).unbind(2)
        projections = tuple(block.attn.prepare() for block in self.layers)
        return ClassCondition(start, modulation, projections, (1 + scale, shift))

    def embed(self, segment: Segment, condition: ClassCondition, features: Tensor | None) -> Tensor:
        """Return the input of a scale: the class for scale 0, else embedded features [B, t_k, channels]."""
        position = self.lvl_embed.weight[segment.index] + self.pos_1LC[:, segment.start : segment.end]
        if features is None:
            return condition.start[:, None] + self.pos_start + position
        return linear(features, self.word_embed.weight, self.word_embed.bias, self.compute) + position

    def logits(self, x: Tensor, condition: ClassCondition) -> Tensor:
        """Map the last hidden state [B, T, width] to float32 [B, T, codes]."""
        x = modulate(x, *condition.head, self.compute)
        return linear(x, self.head.weight, self.head.bias, self.compute).float()

    def scale(
        self, segment: Segment, condition: ClassCondition, features: Tensor | None, attend: Attend
    ) -> Tensor:
        """Return the logits of one scale, float32 [B, t_k, codes]."""
        x = self.embed(segment, condition, features)
        return self.logits(self._through(x, condition, attend), condition)

    def forward(self, labels: Tensor, features: Tensor, scales: int | None = None) -> Tensor:
        """Run the first scales (None for all) in one pass and return logits float32 [B, sum t_k, codes].

        Tokens attend to their own and earlier scales. Labels are int64 [B]; `features` are the inputs of scales from 1
        on, [B, sum t_k - t_0, channels].
        """
        segments = self.config.segments[:scales]
        condition = self.condition(labels)
        parts: Sequence[Tensor | None] = [None, *features.split([s.length for s in segments[1:]], 1)]
        x = torch.cat([self.embed(s, condition, part) for s, part in zip(segments, parts, strict=True)], 1)
        return self.logits(self._through(x, condition, make_attend(segments)), condition)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise weights for training: open gates, branches that start at zero, temperature 8."""
        init_linear(self, generator)
        for table in (self.class_emb.weight, self.pos_start, self.pos_1LC):
            table.normal_(0, 0.5, generator=generator)
        self.lvl_embed.weight.normal_(0, 0.3, generator=generator)
        self.head.weight.mul_(0.1)
        for name, parameter in self.named_parameters():
            if name.endswith("ada_lin.1.weight"):
                parameter.mul_(0.1)
        for block in self.layers:
            block.attn.proj.weight.zero_()
            block.ffn.fc2.weight.zero_()
            block.attn.scale_mul_1H11.fill_(8.0).log_()
            if self.config.shared_aln:
                block.ada_gss[:, :, :2] = 1
            else:
                block.ada_lin.get_parameter("1.bias").unflatten(0, (6, -1))[:2] = 1

    def _through(self, x: Tensor, condition: ClassCondition, attend: Attend) -> Tensor:
        for layer, block in enumerate(self.layers):
            x = block(x, layer, condition.modulation[layer], condition.projections[layer], attend)
        return x


def _modulation(width: int) -> nn.Sequential:
    return nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))


def _modulate(ada_lin: nn.Sequential, start: Tensor, dtype: torch.dtype) -> Tensor:
    layer = ada_lin[1]
    assert isinstance(layer, nn.Linear)
    out = linear(F.silu(start), layer.weight, layer.bias, dtype)
    return out.unflatten(-1, (1, -1, start.shape[-1]))
