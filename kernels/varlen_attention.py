"""Attention over the cached slots by torch's variable-length attention (torch 2.12), in cuDNN or FlashAttention.

A row (a sequence and a KV head) is a sequence with one head for that function. Query heads that share a KV head become
queries of their row, since all queries see the whole past. The function reads rows in storage order: queries are
gathered in that order, and outputs are scattered back.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvbench.kernels.attention_states import empty_state
from kvbench.kernels.fused_attention import Request, find_fa3_obstacle, find_flash, find_fused_obstacle
from kvbench.kernels.layout import Past, State, fold_rows

Library = Literal["cudnn", "flash", "fa3"]
"""Libraries; `flash` is FlashAttention-2, which is part of torch."""
CUDNN_VERSION = 91800
"""First version of cuDNN that attends to rows of unequal length: 9.18."""


class RowTable(NamedTuple):
    """Offsets of N rows in storage order, arguments of `torch.nn.attention.varlen.varlen_attn`.

    Attributes:
        cu_seq_q: int32 [N + 1], first query of each row, and the end of the last row.
        cu_seq_k: int32 [N + 1], first slot of each row, and the end of the last row; free slots may follow each row.
        seqused_k: int32 [N], used slots of each row.
        max_q: queries per row.
        max_k: slots of the longest row, or more.
    """

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    seqused_k: Tensor
    max_q: int
    max_k: int


@cache
def find_varlen() -> Callable[..., Any] | None:
    """Return torch's variable-length attention with log-sum-exp; None if it accepts no lengths."""
    try:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn
    except ImportError:
        return None
    parameters = inspect.signature(varlen_attn).parameters
    required = {"seqused_k", "num_splits", "return_aux"}
    return partial(varlen_attn, return_aux=AuxRequest(lse=True)) if required <= parameters.keys() else None


def find_varlen_obstacle(library: Library, request: Request) -> str | None:
    """Return why a library cannot attend to rows of unequal length; None if it can."""
    if request.device.type != "cuda":
        return "needs a GPU"
    if find_varlen() is None:
        return f"needs torch 2.12, whose varlen_attn takes lengths; this is {torch.__version__}"
    if request.head_dim % 8:
        return "needs a multiple of 8 channels"
    if library == "cudnn":
        return find_fused_obstacle("cudnn", request) or _find_ragged_cudnn_obstacle(request.device)
    if problem := find_fused_obstacle("flash", request):
        return problem
    if library == "fa3":
        return find_fa3_obstacle(request.device)
    active = find_flash(request.device)
    return f"{active} is active in its place" if active else None


def _find_ragged_cudnn_obstacle(device: torch.device) -> str | None:
    """Return why cuDNN cannot attend to rows of unequal length; None if it can."""
    release = tuple(int(number) for number in torch.__version__.split(".")[:2])
    if release < (2, 15):
        return f"needs torch 2.15, which lets the caller choose it; this is {torch.__version__}"
    if (torch.backends.cudnn.version() or 0) < CUDNN_VERSION:
        return "needs cuDNN 9.18"
    major = torch.cuda.get_device_properties(device).major
    return None if major in (9, 10) else "needs a GPU of capability 9.0 or 10.0"


def tabulate_rows(past: Past, queries: int, library: Library) -> RowTable:
    """Return the offsets of rows with `queries` queries each, without waiting for the device.

    cuDNN builds a plan for every `max_k`, so `max_k` is a power of two there.
    """
    layout, (batch, slots, _) = past.layout, past.keys.shape
    device, longest = past.keys.device, layout.longest
    starts = layout.offsets.index_select(0, layout.order)
    firsts = torch.arange(batch, device=device)[:, None] * slots + starts
    return RowTable(
        torch.arange(0, (firsts.numel() + 1) * queries, queries, dtype=torch.int32, device=device),
        F.pad(firsts.flatten(), (0, 1), value=batch * slots).int(),
        layout.lengths.index_select(0, layout.order).repeat(batch),
        queries,
        1 << (longest - 1).bit_length() if library == "cudnn" else longest,
    )


def varlen_attention(q: Tensor, past: Past, scale: float, library: Library) -> State:
    """Attend to each row's own cached slots.

    FlashAttention gives all keys of a row to one program, so that a row's bytes do not depend on other rows; cuDNN may
    split a row's keys differently.

    Args:
        q: [sequences, heads, queries, D].
        past: stored keys and values; its rows are the sequences x heads, in that order.
        scale: factor on q k^T, positive.
        library: library to call.

    Returns:
        The state, its output in q's dtype; (0, -inf) for empty rows.
    """
    layout, (batch, slots, channels) = past.layout, past.keys.shape
    if not layout.total:
        return empty_state(q)
    shape, rows = q.shape, len(layout.counts)
    folded = fold_rows(q, batch, rows)
    if not layout.uniform:
        folded = folded.index_select(1, layout.order)
    keys, values = (x.to(q.dtype).view(batch * slots, 1, channels) for x in past[:2])
    attend, table = find_varlen(), tabulate_rows(past, shape[2], library)._asdict()
    assert attend is not None
    backend = SDPBackend.CUDNN_ATTENTION if library == "cudnn" else SDPBackend.FLASH_ATTENTION
    splits = {} if library == "cudnn" else {"num_splits": 1}
    with sdpa_kernel(backend):
        out, lse = attend(folded.reshape(-1, 1, channels), keys, values, **table, scale=scale, **splits)
    out, lse = out.view(batch, rows, shape[2], channels), lse.contiguous().view(batch, rows, shape[2])
    if not layout.groups[-1].length:  # empty rows are last in storage order
        first = rows - layout.groups[-1].size
        out[:, first:], lse[:, first:] = 0, -torch.inf
    if not layout.uniform:
        out, lse = (x.index_select(1, layout.places) for x in (out, lse))
    return out.view(shape), lse.view(shape[:3])
