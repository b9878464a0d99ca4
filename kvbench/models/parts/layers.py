"""Building blocks of Infinity's and VAR's transformers; parameter names are the official ones.

Shapes: B sequences, T current tokens, H heads of D channels, residual stream x [B, T, width]. Rounding: a block
computes in the dtype of its parameters (bf16 in the official runs, float32 otherwise) and keeps norms, modulation,
rotation and residual stream in the dtypes of the official code under autocast.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvbench.core.segments import Segment
from kvbench.kernels.linear import linear
from kvbench.kernels.modulate import EPSILON, layer_norm, modulate
from kvbench.kernels.qk_norm_rope import qk_norm_rope
from kvbench.models.parts.cross_attention import AbsorbedText, CrossAttention, TextKeys

PIECE_BYTES = 128 << 20
"""Maximum bytes of the feed-forward's hidden layer at once; whole it would be the largest tensor of a generation.

A piece keeps a GPU busy. The embedded model's layer is smaller, because splitting may select another matrix routine.
"""

Attend = Callable[[int, Tensor, Tensor, Tensor, Callable[[], Tensor]], Tensor]
"""(layer, q, k, v, raw_queries) -> attention output, all [B, H, T, D]; `raw_queries` computes the projected queries."""


class Projection(NamedTuple):
    """Tensors that a self-attention computes once for all scales.

    Attributes:
        bias: [3 width], added to the joint projection of queries, keys and values.
        lengths: float32 [2, H], lengths that queries (temperature) and keys (1) are scaled to.
    """

    bias: Tensor
    lengths: Tensor


class Modulation(NamedTuple):
    """Gate, factor and shift of the attention (1) and of the feed-forward layer (2), [B, 1, width] each."""

    gate1: Tensor
    gate2: Tensor
    factor1: Tensor
    factor2: Tensor
    shift1: Tensor
    shift2: Tensor

    @classmethod
    def split(cls, gss: Tensor) -> "Modulation":
        """Split two gates, two scales and two shifts, [B, 1, 6, width], where a factor is 1 + scale."""
        gate1, gate2, scale1, scale2, shift1, shift2 = gss.unbind(2)
        return cls(gate1, gate2, 1 + scale1, 1 + scale2, shift1, shift2)


class LayerCondition(NamedTuple):
    """Tensors that a layer computes once for all scales.

    Attributes:
        modulation: float32.
        projection: projection of the self-attention.
        text: keys and values of the text.
    """

    modulation: Modulation
    projection: Projection
    text: TextKeys | AbsorbedText


class SelfAttention(nn.Module):
    """Cosine attention with a learned temperature per head; the caller supplies the attention function."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.scale_mul_1H11 = nn.Parameter(torch.full((1, heads, 1, 1), math.log(4.0)))
        self.mat_qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        self.proj = nn.Linear(width, width)

    def prepare(self) -> Projection:
        """Return the tensors of the projection that all scales share."""
        bias = torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))
        temperature = self.scale_mul_1H11.flatten().clamp_max(math.log(100)).float().exp()
        return Projection(bias, torch.stack((temperature, torch.ones_like(temperature))))

    def forward(
        self,
        modulated: Callable[[], Tensor],
        layer: int,
        projection: Projection,
        rotation: Tensor | None,
        attend: Attend,
    ) -> Tensor:
        """Attend from the current tokens and return [B, T, width] in the weights' dtype.

        Args:
            modulated: computes the input [B, T, width], again for raw queries, so that it need not be stored.
            layer: index for `attend`.
            projection: result of `prepare`.
            rotation: complex64 [T, D/2] of the current tokens; None for no rotation.
            attend: attention function.
        """
        weight = self.mat_qkv.weight

        def project(rows: Tensor, bias: Tensor | None) -> Tensor:
            return linear(modulated(), rows, bias, weight.dtype).unflatten(
                -1, (-1, self.heads, self.head_dim)
            )

        def raw_queries() -> Tensor:
            return project(weight[: len(self.q_bias)], None)[:, :, 0].transpose(1, 2)

        # Queries, keys and values have no name here, so that they are freed before the output is projected.
        out = attend(
            layer, *qk_norm_rope(project(weight, projection.bias), projection.lengths, rotation), raw_queries
        )
        return linear(out.transpose(1, 2).flatten(2), self.proj.weight, self.proj.bias, weight.dtype)


class FeedForward(nn.Module):
    """Feed-forward layer: linear, GELU (tanh form), linear."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, h: Tensor) -> Tensor:
        """Map h [B, T, width], modulated and in the weights' dtype, to [B, T, width].

        Without gradients tokens are processed in pieces of `PIECE_BYTES`, and h is overwritten if there are several.
        """
        rows = h.flatten(0, 1)
        size = max(1, PIECE_BYTES // (self.fc1.out_features * h.element_size()))
        if torch.is_grad_enabled() or len(rows) <= size:
            return self._map(h)
        for piece in rows.split(size):
            piece.copy_(self._map(piece))
        return rows.view(h.shape)

    def _map(self, h: Tensor) -> Tensor:
        dtype = self.fc1.weight.dtype
        h = linear(h, self.fc1.weight, self.fc1.bias, dtype, gelu=True)
        return linear(h, self.fc2.weight, self.fc2.bias, dtype)


class InfinityBlock(nn.Module):
    """Self-attention and feed-forward under shared AdaLN, cross-attention ungated between them."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.width = width
        self.ada_gss = nn.Parameter(torch.zeros(1, 1, 6, width))
        self.sa = SelfAttention(width, heads)
        self.ca = CrossAttention(width, heads)
        self.ffn = FeedForward(width, hidden)
        self.ca_norm = nn.LayerNorm(width, eps=EPSILON)

    def condition(self, gss: Tensor, context: Tensor, mask: Tensor) -> LayerCondition:
        """Compute the layer's tensors for all scales.

        Arguments are the shared modulation float32 [B, 1, 6, width], the text [B, words, width] and its mask of words,
        bool [B, words].
        """
        modulation = Modulation.split(self.ada_gss + gss)
        return LayerCondition(modulation, self.sa.prepare(), self.ca.prepare(context, mask))

    def forward(
        self, x: Tensor, layer: int, condition: LayerCondition, rotation: Tensor, attend: Attend
    ) -> Tensor:
        """Run the layer over the current tokens x [B, T, width]; without gradients x is overwritten."""
        gate1, gate2, factor1, factor2, shift1, shift2 = condition.modulation
        dtype, norm = self.ffn.fc1.weight.dtype, self.ca_norm
        modulated = partial(modulate, x, factor1, shift1, dtype)
        x = add_gated(
            x, self.sa(modulated, layer, condition.projection, rotation, attend), gate1, rounded=True
        )
        x = self.ca(layer_norm(x, norm.weight, norm.bias, dtype), condition.text, x.float())
        return add_gated(x, self.ffn(modulate(x, factor2, shift2, dtype)), gate2, rounded=False)


def count_layer_bytes(rows: int, width: int, hidden: int) -> int:
    """Return a layer's peak bytes on a GPU for `rows` tokens of all sequences: bf16 branches, a float32 stream."""
    branch, stream = 2, 4
    # Queries, keys, values and attention's output; the feed-forward's input, hidden layer and activated copy.
    attention = rows * width * (stream + 4 * branch)
    piece = min(rows * hidden * branch, max(PIECE_BYTES, hidden * branch))
    return max(attention, rows * width * (stream + branch) + 2 * piece)


class AdaLNBeforeHead(nn.Module):
    """Projection of the condition to scale and shift of the norm before the head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))


def add_gated(x: Tensor, h: Tensor, gate: Tensor, *, rounded: bool) -> Tensor:
    """Return x + h gate with a branch's output h [B, T, width] and a gate [B, 1, width].

    Without gradients x is overwritten, and h may be. With `rounded` the product is rounded to h's dtype first, as the
    official in-place product is.
    """
    training = torch.is_grad_enabled()
    if not rounded or h.dtype == torch.float32:
        return torch.addcmul(x, h, gate) if training else x.addcmul_(h, gate)
    return x + (h * gate).to(h.dtype) if training else x.add_(h.mul_(gate))


@torch.no_grad()
def init_linear(module: nn.Module, generator: torch.Generator) -> None:
    """Initialise for training: matrices by N(0, 1 / columns), so that outputs have unit variance; biases by 0."""
    for name, parameter in module.named_parameters():
        if parameter.ndim >= 2 and name.endswith("weight"):
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("bias"):
            parameter.zero_()


def make_attend(segments: Sequence[Segment]) -> Attend:
    """Return attention over all segments at once: tokens attend to their own and earlier ones, logits unscaled."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, raw_queries: Callable[[], Tensor]) -> Tensor:  # noqa: ARG001
        parts = []
        for s in segments:
            # Written out, because the fused kernel's backward pass takes several times longer on a CPU.
            scores = q[:, :, s.start : s.end] @ k[:, :, : s.end].mT
            parts.append(scores.float().softmax(-1).to(v.dtype) @ v[:, :, : s.end])
        return torch.cat(parts, 2)

    return attend
