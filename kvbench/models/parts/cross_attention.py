"""Attention over the text, whose keys and values are computed once per image; parameter names are the official ones.

Shapes: B sequences, T current tokens, H heads of D channels, W words (tokens of the text encoder).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvbench.kernels.linear import linear
from kvbench.kernels.products import onednn_products


class TextKeys(NamedTuple):
    """Keys and values of the text in a layer, [B, H, W, D], and a mask [B, 1, 1, W], -inf for padding, else 0."""

    keys: Tensor
    values: Tensor
    absent: Tensor


class AbsorbedText(NamedTuple):
    """Keys and values of the text in a layer, float32, multiplied by the projections of queries and output.

    If words are few, attention to them takes fewer operations per token.

    Attributes:
        keys: [B, H W, width], times the queries' projection and 1/sqrt(D).
        bias: summand of the scores, [B, H W, 1]; -inf for padding.
        values: [B, H W, width], times the output's projection, its bias included.
    """

    keys: Tensor
    bias: Tensor
    values: Tensor


class CrossAttention(nn.Module):
    """Cross-attention from the stream to the projected text."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mat_q = nn.Linear(width, width)
        self.mat_kv = nn.Linear(width, 2 * width, bias=False)
        self.v_bias = nn.Parameter(torch.zeros(width))
        self.proj = nn.Linear(width, width)

    def prepare(self, context: Tensor, mask: Tensor) -> TextKeys | AbsorbedText:
        """Project a text [B, W, width] with a mask of words, bool [B, W], for all calls of `forward`."""
        text = project_text(context, self.mat_kv.weight, self.v_bias, self.heads, mask)
        width = len(self.v_bias)
        # In 16 bits the official code rounds queries; absorbed ones would not be rounded.
        exact = text.keys.dtype == torch.float32
        return self._absorbed(text) if exact and mask.shape[1] * (self.heads - 1) < width else text

    def _absorbed(self, text: TextKeys) -> AbsorbedText:
        keys = text.keys * text.keys.shape[-1] ** -0.5
        query_weight = self.mat_q.weight.unflatten(0, (self.heads, -1))  # [H, D, width]
        output_weight = self.proj.weight.T.unflatten(0, (self.heads, -1))
        with onednn_products(keys.numel() * len(self.v_bias), keys.device):
            # The probabilities of a head sum to 1, so each word of each head can contain the head's share of the bias.
            values = torch.einsum("bhwd,hdc->bhwc", text.values, output_weight) + self.proj.bias / self.heads
            bias = keys @ self.mat_q.bias.view(self.heads, -1, 1) + text.absent.mT
            keys = torch.einsum("bhwd,hdc->bhwc", keys, query_weight)
            return AbsorbedText(keys.flatten(1, 2), bias.flatten(1, 2), values.flatten(1, 2))

    def forward(self, h: Tensor, text: TextKeys | AbsorbedText, x: Tensor) -> Tensor:
        """Add attention over the text to the residual stream x, float32 [B, T, width], and return the sum.

        `h` is x normalised. Without gradients x is overwritten.
        """
        training = torch.is_grad_enabled()
        if isinstance(text, AbsorbedText):
            with onednn_products(h.numel() * text.keys.shape[1], h.device):
                scores = torch.baddbmm(text.bias, text.keys, h.mT)
                weights = scores.unflatten(1, (self.heads, -1)).softmax(2).flatten(1, 2)
                return torch.baddbmm(x, weights.mT, text.values, out=None if training else x)
        dtype = self.mat_q.weight.dtype

        def project_queries() -> Tensor:
            q = linear(h, self.mat_q.weight, self.mat_q.bias, dtype).unflatten(-1, (self.heads, -1))
            return q.transpose(1, 2).to(text.keys.dtype)

        # The queries have no name here, so that they are freed before the output is projected.
        added = linear(text_attention(project_queries(), text), self.proj.weight, self.proj.bias, dtype)
        return x + added if training else x.add_(added)


class PooledText(nn.Module):
    """Attention of one learned query to the text, for the start token and the condition of every modulation."""

    def __init__(self, text_width: int, width: int, heads: int) -> None:
        super().__init__()
        self.mat_q = nn.Parameter(torch.zeros(1, heads, width // heads))
        self.mat_kv = nn.Linear(text_width, 2 * width, bias=False)
        self.v_bias = nn.Parameter(torch.zeros(width))
        self.proj = nn.Linear(width, width)

    def forward(self, values: Tensor, mask: Tensor, compute: torch.dtype) -> Tensor:
        """Pool texts [B, W, text_width] with a mask bool [B, W] to [B, width], in the dtype `compute`."""
        heads = self.mat_q.shape[1]
        text = project_text(values, self.mat_kv.weight, self.v_bias, heads, mask, compute)
        q = self.mat_q.unsqueeze(2).expand(len(values), -1, -1, -1).to(text.keys.dtype)
        return linear(text_attention(q, text)[:, 0], self.proj.weight, self.proj.bias, compute)


def project_text(
    context: Tensor,
    weight: Tensor,
    v_bias: Tensor,
    heads: int,
    mask: Tensor,
    compute: torch.dtype | None = None,
) -> TextKeys:
    """Project a text to keys (without bias) and values.

    Args:
        context: [B, W, channels].
        weight: weight of the joint projection, [2 width, channels].
        v_bias: bias of the values, [width].
        heads: number of heads.
        mask: bool [B, W], false for padding.
        compute: dtype of projection and result; None for the dtype of `weight`.
    """
    bias = torch.cat((torch.zeros_like(v_bias), v_bias))
    dtype = compute or weight.dtype
    projected = linear(context, weight, bias, dtype).unflatten(-1, (2, heads, -1))
    keys, values = projected.permute(2, 0, 3, 1, 4)
    # Rows of the mask start at multiples of 16 elements; fused attention would copy unaligned rows at every call.
    padded = torch.zeros(len(mask), 1, 1, -(-mask.shape[1] // 16) * 16, dtype=dtype, device=mask.device)
    absent = padded[..., : mask.shape[1]].masked_fill_(~mask[:, None, None], -math.inf)
    return TextKeys(keys, values, absent)


def text_attention(q: Tensor, text: TextKeys) -> Tensor:
    """Attend from q [B, H, T, D] to the text, scaled by 1/sqrt(D), and return [B, T, H*D]."""
    if q.is_cuda:
        # torch would choose cuDNN's attention on an H100, which replans for every number of words and of tokens.
        absent = text.absent.expand(*q.shape[:3], -1)
        call = torch.ops.aten._scaled_dot_product_efficient_attention
        out = call(q, text.keys, text.values, absent, torch.is_grad_enabled())[0]
    else:
        # The fused kernel's rounding, written out because its backward pass is slow on a CPU. Words precede tokens
        # because a softmax over a short last dimension is slow too.
        rows = (
            q.float(),
            text.keys.float(),
            text.values.float(),
            text.absent.float().mT.expand(-1, q.shape[1], -1, 1),
        )
        queries, keys, values, absent = (x.reshape(-1, *x.shape[2:]) for x in rows)
        scores = torch.baddbmm(absent, keys, queries.mT, alpha=q.shape[-1] ** -0.5)
        weights = scores.softmax(1).to(q.dtype).float()
        out = (weights.mT @ values).to(q.dtype).view(q.shape)
    return out.transpose(1, 2).flatten(2)
