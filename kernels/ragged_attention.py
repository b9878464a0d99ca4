"""Attention of a segment's queries over each row's own cached keys and the whole current segment.

On CUDA one kernel reads both. Elsewhere the past and the present are two attentions merged by their log-sum-exp, so
neither is ever concatenated with the other.
"""

import torch
from torch import Tensor

from kvbench.kernels.compact import Layout, dense


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp in torch's own operations.

    Args:
        q: [batch, rows, queries, D].
        k: [batch, rows, keys, D], at least one key.
        v: likewise.
        scale: factor on q k^T.
        causal: query m sees the keys up to m % keys.

    Returns:
        Output in q's dtype [batch, rows, queries, D], float32 log-sum-exp [batch, rows, queries].
    """
    if q.device.type != "cpu":
        return attention_reference(q, k, v, scale, causal=causal)
    mask = None
    if causal:
        seen = seen_by(q.shape[2], k.shape[2], q.device)
        mask = q.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, chunk: int = 1024, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """The same in plain operations, float32 inside, `chunk` queries at a time."""
    outs, lses = [], []
    seen = seen_by(q.shape[2], k.shape[2], q.device) if causal else None
    for start in range(0, q.shape[2], chunk):
        scores = q[:, :, start : start + chunk].float() @ k.float().transpose(-1, -2) * scale
        if seen is not None:
            scores.masked_fill_(~seen[start : start + chunk], -torch.inf)
        lse = scores.logsumexp(-1)
        outs.append(((scores - lse[..., None]).exp() @ v.float()).to(q.dtype))
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def seen_by(queries: int, tokens: int, device: torch.device) -> Tensor:
    """Bool [queries, tokens]: which token a query sees if it belongs to token m % tokens and sees none after it."""
    token = torch.arange(tokens, device=device)
    return token <= (torch.arange(queries, device=device) % tokens)[:, None]


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past_keys: Tensor,
    past_values: Tensor,
    layout: Layout,
    scale: float,
    *,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Queries over the row's cached slots and the tokens of the current segment.

    q, k and v may have any strides. On CUDA, D is a multiple of 8 and at most 256.

    Args:
        q: [batch, rows, queries, D]; with grouped queries the heads of one KV head lie behind each other in `queries`:
            query m belongs to token m % tokens.
        k: current keys [batch, rows, tokens, D].
        v: current values, likewise.
        past_keys: flat storage [batch, slots, D] (see `kernels/compact.py`), read in q's dtype.
        past_values: likewise.
        layout: where rows lie in the storage.
        scale: factor on q k^T, positive.
        causal: current tokens are seen by themselves and those after them; else by all.

    Returns:
        Output in q's dtype [batch, rows, queries, D], float32 log-sum-exp [batch, rows, queries].
    """
    if q.is_cuda:
        from kvbench.kernels.ragged_attention_triton import ragged_attention_triton

        return ragged_attention_triton(q, k, v, past_keys, past_values, layout, scale, causal=causal)
    out, lse = attention_with_lse(q, k, v, scale, causal=causal)
    for group in layout.groups:
        keys, values = (dense(storage, group).to(q.dtype) for storage in (past_keys, past_values))
        if group.rows is None:
            past, past_lse = attention_with_lse(q, keys, values, scale)
            out.lerp_(past, torch.sigmoid(past_lse - lse)[..., None].to(out.dtype))
            return out, torch.logaddexp(lse, past_lse)
        past, past_lse = attention_with_lse(q.index_select(1, group.rows), keys, values, scale)
        before = lse.index_select(1, group.rows)
        weight = torch.sigmoid(past_lse - before)[..., None].to(out.dtype)
        out.index_copy_(1, group.rows, torch.lerp(out.index_select(1, group.rows), past, weight))
        lse.index_copy_(1, group.rows, torch.logaddexp(before, past_lse))
    return out, lse
