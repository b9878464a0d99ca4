"""Checks of what Triton kernels are given, in their place: tensors without numbers on a GPU that is not there."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kernels.layout import Layout, Past, PlacedRows, arrange_rows
from kvbench.kernels.planes import Plane
from kvbench.kernels.qk_norm_rope import HeadNorms
from kvbench.kernels.triton.launch import align_rows
from tests.support.fake_device import CUDA


def on_cuda(*tensors: Tensor) -> None:
    assert all(tensor.device == CUDA for tensor in tensors)


def in_layout(layout: Layout, past: Tensor) -> None:
    on_cuda(layout.offsets, layout.lengths, layout.order)
    assert (layout.offsets.dtype, layout.lengths.dtype) == (torch.int64, torch.int32)
    assert past.shape[1] == layout.capacity
    assert past.is_contiguous()


def attention(
    q: Tensor, k: Tensor, v: Tensor, past: Past, scale: float, dtype: torch.dtype | None = None, **_: object
) -> tuple[Tensor, Tensor]:
    keys, values, layout = past
    on_cuda(q, k, v, keys, values)
    in_layout(layout, keys)
    assert q.dtype == k.dtype == v.dtype == keys.dtype == values.dtype
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert len(keys) * len(layout.counts) == q.shape[:2].numel() == k.shape[:2].numel()
    for x in (q, k, v):
        assert align_rows(x)[0] is x  # not copied
    if q.stride(1) < q.stride(2):
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3], dtype=dtype).transpose(1, 2)
    else:
        out = q.new_empty(q.shape, dtype=dtype)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def past_attention(
    q: Tensor, past: Past, scale: float, *, state: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    assert state is not None
    out, lse = attention(q, q, q, past, scale)
    assert (out.shape, out.dtype, out.stride()) == (state[0].shape, state[0].dtype, state[0].stride())
    assert (lse.shape, lse.dtype, lse.stride()) == (state[1].shape, state[1].dtype, state[1].stride())
    return state


def merge_pair(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    on_cuda(out, lse, more, more_lse)
    assert (out.shape, lse.shape) == (more.shape, more_lse.shape)
    assert lse.is_contiguous()
    assert more_lse.is_contiguous()


def mass(
    q: Tensor,
    k: Tensor,
    past: Past,
    scale: float,
    *,
    power: int = 1,
    lse: Tensor | None,
    tokens: Tensor | None,
) -> Tensor:
    keys, _, layout = past
    on_cuda(q, k, keys)
    in_layout(layout, keys)
    if tokens is not None:
        on_cuda(tokens)
    assert lse is None or (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    assert lse is None or lse.is_contiguous()
    return q.new_empty(len(keys), len(layout.counts), layout.longest + k.shape[2], dtype=torch.float32)


def rebuild(
    stored: tuple[Tensor, ...], current: tuple[Tensor, ...], source: Tensor, out: tuple[Tensor, ...]
) -> None:
    on_cuda(*stored, *current, source, *out)
    assert source.dtype == torch.int32
    for storage, present, moved in zip(stored, current, out, strict=True):
        assert align_rows(present)[0] is present
        assert moved.shape == (storage.shape[0], len(source), storage.shape[2])
        assert len({x.untyped_storage()._cdata for x in (storage, present)}) == 2


def modulate(x: Tensor, factor: Tensor, shift: Tensor, dtype: torch.dtype, epsilon: float) -> Tensor:
    on_cuda(x, factor, shift)
    assert factor.stride(-1) == shift.stride(-1) == 1
    assert factor.shape == shift.shape == (x.shape[0], 1, x.shape[2])
    return x.new_empty(x.shape, dtype=dtype)


def norm_rope(
    qkv: Tensor, lengths: Tensor, rotation: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    on_cuda(qkv, lengths, *([] if rotation is None else [rotation]))
    _, tokens, _, heads, channels = qkv.shape
    assert qkv.is_contiguous()
    assert (lengths.shape, lengths.dtype) == ((2, heads), torch.float32)
    assert lengths.is_contiguous()
    if rotation is not None:
        assert (rotation.shape, rotation.dtype) == ((tokens, channels // 2), torch.complex64)
        assert rotation.is_contiguous()
    return tuple(qkv.permute(2, 0, 3, 1, 4))


def grouped_norm_rope(
    joint: Tensor, kv_heads: int, norms: HeadNorms | None, rotation: Tensor
) -> tuple[Tensor, ...]:
    batch, tokens, heads, channels = joint.shape
    on_cuda(joint, rotation, *([] if norms is None else norms[:2]))
    assert joint.is_contiguous()
    assert (rotation.shape, rotation.dtype) == ((tokens, channels // 2), torch.complex64)
    parts = (heads - 2 * kv_heads, kv_heads, kv_heads)
    return tuple(joint.new_empty(batch, tokens, part, channels).transpose(1, 2) for part in parts)


def rms_norm(x: Tensor, h: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    on_cuda(x, weight, *([] if h is None else [h]))
    assert weight.shape == x.shape[-1:]
    assert h is None or (h.shape, h.dtype) == (x.shape, x.dtype)
    return torch.empty_like(x), x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))


def silu_mul(gate: Tensor, x: Tensor) -> Tensor:
    on_cuda(gate, x)
    assert (gate.shape, gate.dtype) == (x.shape, x.dtype)
    assert (
        gate.stride() == x.stride() == (*gate.stride()[:-2], 2 * gate.shape[-1], 1)
    )  # halves of one product
    return gate.new_empty(gate.shape)


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, *, silu: bool) -> Tensor:
    on_cuda(x, weight, bias)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert weight.shape == bias.shape == (x.shape[1],)
    assert weight.dtype == bias.dtype
    assert x.shape[1] % groups == 0
    return torch.empty_like(x)


def decode(q: Tensor, k: Tensor, v: Tensor, rows: PlacedRows, scale: float) -> Tensor:
    on_cuda(q, k, v, *rows[:-1])
    assert (k.shape, k.shape[2]) == (v.shape, 1)
    for table, dtype in zip(rows[2:6], (torch.int64, torch.int64, torch.int32, torch.int32), strict=True):
        assert (table.shape, table.dtype) == ((q.shape[1],), dtype)
    assert all((x.shape, x.dtype) == ((1,), torch.int64) for x in (rows.stride, rows.filled))
    assert q.dtype == k.dtype == v.dtype == rows.keys.dtype == rows.values.dtype
    return q.new_empty(q.shape)


def quantised(
    q: Tensor,
    plane: Plane,
    scale: float,
    state: tuple[Tensor, Tensor] | None,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    if state is None:
        assert dtype == torch.float32
        state = q.new_empty(q.shape, dtype=dtype), q.new_empty(q.shape[:3], dtype=torch.float32)
    given = [x for part in (plane.keys, plane.values) for x in part if isinstance(x, Tensor)]
    given += [plane.positions, *(() if plane.rotation is None else (plane.rotation,))]
    on_cuda(q, *given, *state, plane.layout.offsets, plane.layout.lengths, plane.layout.order)
    assert all(x.is_contiguous() for x in given)
    assert plane.keys.numbers.shape[:2] == plane.values.numbers.shape[:2]
    assert plane.keys.numbers.shape[1] == plane.layout.total
    assert (state[0].shape, state[0].dtype) == (q.shape, torch.float32)
    return state


def keeping_all(
    layout: Layout,
    keep: Tensor | None,
    start: int,
    length: int,
    free_slots: int,
    counts: Sequence[int] | None = None,
) -> tuple[Layout, Tensor]:
    """In place of the real plan, which counts on the host what is kept."""
    rows = len(layout.counts)
    assert keep is None or (keep.shape, keep.dtype) == ((rows, layout.longest + length), torch.bool)
    assert keep is None or keep.device == CUDA
    counts = [layout.longest + length] * rows if counts is None else [*counts]
    positions = torch.empty(rows, max(counts), dtype=torch.int64, device=CUDA)
    after = arrange_rows(positions, counts, free_slots)
    return after, torch.empty(after.capacity, dtype=torch.int32, device=CUDA)


KERNELS = {
    "ragged_attention.ragged_attention": attention, "past_attention.past_attention": past_attention,
    "attention_mass.attention_mass": mass, "modulate.modulate": modulate, "qk_norm_rope.qk_norm_rope": norm_rope,
    "compact.rebuild": rebuild, "softmax.merge_pair": merge_pair, "decode_attention.decode_attention": decode,
    "quantised_attention.quantised_attention": quantised, "rms_norm.rms_norm": rms_norm,
    "qk_norm_rope.grouped_norm_rope": grouped_norm_rope, "swiglu.silu_mul": silu_mul,
    "group_norm.group_norm": group_norm,
}  # fmt: skip
"""Modules of `kvbench.kernels.triton` and their launchers, without the `_triton` behind them."""
