"""Generation as the official program does it, on our weights: the baseline of the engine benchmark.

Every layer in the plainest operations: keys (float32) and values concatenated with all earlier ones, the last scale
included; the text projected again at every scale; norms, modulation, rotation and activation one operation each.
Images are equal to the engine's up to rounding (`tests/benchmarks/test_benchmarks.py`).
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
from kvbench.models.parts.layers import Attend, Block


class PlainCache:
    """Keys and values concatenated at every scale, the last one included."""

    repetitions = None

    def reset(self, sequences: int) -> None:
        """Drops everything."""
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, segment: Segment) -> None:
        """Nothing to prepare."""

    def release(self) -> None:
        """Keeps everything, as the official program does while it decodes."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plain: object = None) -> Tensor:
        """Concatenates, then attends in v's dtype; keys stay in the dtype they come in."""
        if layer in self._held:
            k, v = (torch.cat(pair, 2) for pair in zip(self._held[layer], (k, v), strict=True))
        self._held[layer] = (k, v)
        return F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, scale=1.0)


class PlainCondition(NamedTuple):
    """Shared modulation [B, 1, 6, width], the text [B, words, width], 0 or -inf for its words [B, 1, 1, words]."""

    gss: Tensor
    context: Tensor
    absent: Tensor


class PlainBlock(Block):
    """One layer of Infinity, operation by operation."""

    def condition(self, gss: Tensor, context: Tensor, mask: Tensor) -> PlainCondition:
        """Nothing is computed ahead."""
        absent = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -math.inf)
        return PlainCondition(gss, context, absent[:, None, None])

    def forward(
        self, x: Tensor, layer: int, condition: PlainCondition, rotation: Tensor, attend: Attend
    ) -> Tensor:
        """One layer over the current tokens; arguments as of `Block`."""
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
        both = F.linear(condition.context.to(dtype), ca.mat_kv.weight, bias)
        k, v = both.unflatten(-1, (2, ca.heads, -1)).permute(2, 0, 3, 1, 4)
        q = q.unflatten(-1, (ca.heads, -1)).transpose(1, 2)
        # As in the engine: cuDNN plans masks of odd lengths anew, or not at all.
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
    """The loaded model with every layer replaced, weights shared; to be run with a `PlainCache`."""
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
