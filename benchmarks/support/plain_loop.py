"""Plain generation loop that follows Infinity's official code, on our weights: baseline of the engine benchmark.

Every layer uses basic operations: keys (float32) and values are concatenated with all earlier ones, including the last
scale; the text is projected at every scale; norms, modulation, rotation and activation are unfused. Images
equal the engine's up to rounding (`tests/benchmarks/test_benchmarks.py`).
"""

import math
from contextlib import nullcontext
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvbench.core.segments import Segment
from kvbench.models.infinity.model import InfinityModel
from kvbench.models.parts.layers import Attend, InfinityBlock


class PlainCache:
    """Cache that concatenates keys and values at every scale, including the last."""

    repetitions = None

    def reset(self, sequences: int) -> None:
        """Drop all keys and values."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, segment: Segment) -> None:
        """Do nothing: the plain cache needs no segments."""

    def release(self) -> None:
        """Keep everything, as the official code does during decoding."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plain: object = None) -> Tensor:
        """Concatenate, then attend in v's dtype; keys keep their dtype."""
        if layer in self._layers:
            k, v = (torch.cat(pair, 2) for pair in zip(self._layers[layer], (k, v), strict=True))
        self._layers[layer] = (k, v)
        return F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, scale=1.0)


class PlainCondition(NamedTuple):
    """Shared modulation [B, 1, 6, width], text [B, words, width], additive mask of its words [B, 1, 1, words]."""

    gss: Tensor
    context: Tensor
    absent: Tensor


class PlainBlock(InfinityBlock):
    """Layer of Infinity written in basic operations of torch."""

    def condition(self, gss: Tensor, context: Tensor, mask: Tensor) -> PlainCondition:
        """Return the inputs, without precomputation."""
        absent = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -math.inf)
        return PlainCondition(gss, context, absent[:, None, None])

    def forward(
        self, x: Tensor, layer: int, condition: PlainCondition, rotation: Tensor, attend: Attend
    ) -> Tensor:
        """Apply the layer to the current tokens; arguments as in `InfinityBlock`."""
        gate1, gate2, scale1, scale2, shift1, shift2 = (self.ada_gss + condition.gss).unbind(2)
        h = self._self_attention(self._modulated(x, scale1, shift1), layer, rotation, attend)
        x = x + (h * gate1).to(h.dtype)
        norm = self.ca_norm
        h = F.layer_norm(x.float(), (self.width,), norm.weight.float(), norm.bias.float(), norm.eps)
        x = x + self._text_attention(h, condition).float()
        h, ffn = self._modulated(x, scale2, shift2), self.ffn
        h = F.gelu(F.linear(h, ffn.fc1.weight, ffn.fc1.bias), approximate="tanh")
        return x + F.linear(h, ffn.fc2.weight, ffn.fc2.bias) * gate2

    def _text_attention(self, h: Tensor, condition: PlainCondition) -> Tensor:
        ca = self.ca
        dtype = ca.mat_q.weight.dtype
        q = F.linear(h.to(dtype), ca.mat_q.weight, ca.mat_q.bias)
        bias = torch.cat((torch.zeros_like(ca.v_bias), ca.v_bias))
        kv = F.linear(condition.context.to(dtype), ca.mat_kv.weight, bias)
        k, v = kv.unflatten(-1, (2, ca.heads, -1)).permute(2, 0, 3, 1, 4)
        q = q.unflatten(-1, (ca.heads, -1)).transpose(1, 2)
        # As in `text_attention`: cuDNN replans for every number of words.
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if q.is_cuda else nullcontext():
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=condition.absent.to(q))
        return F.linear(out.transpose(1, 2).flatten(2), ca.proj.weight, ca.proj.bias)

    def _modulated(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        h = F.layer_norm(x.float(), (self.width,), eps=1e-6) * (scale + 1) + shift
        return h.to(self.ffn.fc1.weight.dtype)

    def _self_attention(self, h: Tensor, layer: int, rotation: Tensor, attend: Attend) -> Tensor:
        sa = self.sa
        bias = torch.cat((sa.q_bias, torch.zeros_like(sa.q_bias), sa.v_bias))
        qkv = F.linear(h, sa.mat_qkv.weight, bias).unflatten(-1, (3, sa.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        temperature = sa.scale_mul_1H11.clamp_max(math.log(100)).exp()
        q, k = F.normalize(q.float(), dim=-1) * temperature, F.normalize(k.float(), dim=-1)
        q, k = _rotated(torch.stack((q, k)), rotation)
        out = attend(layer, q, k, v, lambda: q)
        return F.linear(out.transpose(1, 2).flatten(2), sa.proj.weight, sa.proj.bias)


def plain_loop(model: InfinityModel) -> InfinityModel:
    """Return the loaded model with plain layers that share its weights; it runs with a `PlainCache`."""
    other, transformer = copy(model), copy(model._transformer)
    config = transformer.config
    with torch.device("meta"):
        blocks = tuple(
            PlainBlock(config.width, config.heads, config.feed_forward) for _ in transformer.layers
        )
    for block, source in zip(blocks, transformer.layers, strict=True):
        block.load_state_dict(source.state_dict(), assign=True)
    transformer.layers, other._transformer = blocks, transformer
    return other


def _rotated(qk: Tensor, rotation: Tensor) -> Tensor:
    first, second = qk.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotation.real, rotation.imag
    return torch.stack((cos * first - sin * second, sin * first + cos * second), -1).flatten(-2)
