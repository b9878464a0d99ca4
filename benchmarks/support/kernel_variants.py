"""Variants of every Triton kernel as real models launch them, with tiles for a compute capability."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.support.plane_cases import Stored, arrange_lengths, make_plane
from benchmarks.support.triton_launches import TYPES, Variant, list_launches
from kvbench.kernels import modulate as modulate_torch
from kvbench.kernels import qk_norm_rope as qk_norm_rope_torch
from kvbench.kernels.layout import Past, locate_rows
from kvbench.kernels.triton import tiles
from kvbench.kernels.triton.attention_mass import attention_mass_triton
from kvbench.kernels.triton.compact import rebuild_triton
from kvbench.kernels.triton.decode_attention import decode_attention_triton
from kvbench.kernels.triton.draw import (
    draw_bits_triton,
    draw_candidate_triton,
    draw_codes_triton,
    gumbel_softmax_triton,
)
from kvbench.kernels.triton.group_norm import group_norm_triton
from kvbench.kernels.triton.modulate import modulate_triton
from kvbench.kernels.triton.past_attention import past_attention_triton
from kvbench.kernels.triton.qk_norm_rope import grouped_norm_rope_triton, qk_norm_rope_triton
from kvbench.kernels.triton.quantised_attention import quantised_attention_triton
from kvbench.kernels.triton.ragged_attention import ragged_attention_triton
from kvbench.kernels.triton.rms_norm import rms_norm_triton
from kvbench.kernels.triton.softmax import merge_pair_triton, merge_shares
from kvbench.kernels.triton.swiglu import silu_mul_triton

LONG_ROW = 1 << 16
"""Slots of a row that is long enough for the largest tiles."""


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor of a dtype without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def make_past(dtype: torch.dtype, head_dim: int, rows: int, length: int = LONG_ROW) -> Past:
    """Return the past of rows with `length` slots, without data."""
    stored = empty(1, rows * length, head_dim, dtype=dtype)
    return Past(stored, stored, arrange_lengths([length] * rows))


def attention(
    dtype: torch.dtype, head_dim: int, queries: int, rows: int, *, causal: bool = False, keys: int = 0
) -> Variant:
    """Return the ragged attention of `queries` queries on `rows` rows, with `keys` current keys if set."""
    q = empty(1, rows, queries, head_dim, dtype=dtype)
    k = q[:, :, : keys or queries]
    past = make_past(dtype, head_dim, rows, 0 if keys else LONG_ROW)
    name = f"attention {TYPES[dtype]}"
    return list_launches(name, ragged_attention_triton, q, k, k, past, 1.0, causal=causal)[0]


def past(
    dtype: torch.dtype, head_dim: int, queries: int, rows: int, *, keys: int = LONG_ROW, resume: bool = True
) -> Variant:
    """Return attention of `queries` queries to the past of `rows` rows of `keys` slots."""
    q = empty(1, rows, queries, head_dim, dtype=dtype)
    state = (q, empty(*q.shape[:3])) if resume else None
    stored = make_past(dtype, head_dim, rows, keys)
    return list_launches(f"past {TYPES[dtype]}", past_attention_triton, q, stored, 1.0, state=state)[0]


def decode(dtype: torch.dtype, head_dim: int, queries: int) -> Variant:
    """Return attention of one new token; `queries` query heads share its key and value."""
    q, filled = empty(1, 1, queries, head_dim, dtype=dtype), empty(1, dtype=torch.int64)
    inputs = (q, q[:, :, :1], q[:, :, :1], locate_rows(make_past(dtype, head_dim, 1), filled), 1.0)
    return list_launches(f"decode {TYPES[dtype]}", decode_attention_triton, *inputs)[0]


def quantised(
    dtype: torch.dtype, head_dim: int, queries: int, form: Stored, *, resume: bool = False
) -> Variant:
    """Return attention of `queries` queries on each of 64 rows to a plane."""
    plane = make_plane(form, arrange_lengths([1] * 64), 1, head_dim, block=1)
    q = empty(1, 64, queries, head_dim, dtype=dtype)
    state = (q, empty(*q.shape[:3])) if resume else None
    return list_launches(f"{form.name} {TYPES[dtype]}", quantised_attention_triton, q, plane, 1.0, state)[0]


def mergers(dtype: torch.dtype, head_dim: int) -> list[Variant]:
    """Return the merge of splits of a row's keys and the merge of two states."""
    out, lse = empty(1, 1, 16, head_dim, dtype=dtype), empty(1, 1, 16)
    shares = empty(2, *out.shape), empty(2, *lse.shape)
    merge = list_launches("merge", merge_shares, *shares, out)
    return merge + list_launches("merge of two", merge_pair_triton, out, lse, out, lse)


def mass(dtype: torch.dtype, head_dim: int) -> list[Variant]:
    """Return the variants of both passes of attention mass."""
    q = empty(1, 1, 64, head_dim, dtype=dtype)
    passes = list_launches("", attention_mass_triton, q, q, make_past(dtype, head_dim, 1), 1.0)
    names = (f"{name} {TYPES[dtype]}" for name in ("sums", "mass"))
    return [variant._replace(name=name) for name, variant in zip(names, passes, strict=True)]


def copy(dtype: torch.dtype, head_dim: int) -> list[Variant]:
    """Return the variants that rebuild keys and values."""
    pair, source = [empty(1, 64, head_dim, dtype=dtype)] * 2, empty(64, dtype=torch.int32)
    return list_launches(
        f"copy {TYPES[dtype]}", rebuild_triton, pair, [x[:, None] for x in pair], source, pair
    )


def layers(dtype: torch.dtype, head_dim: int, width: int) -> list[Variant]:
    """Return the variants of the kernels between a layer's matrix products."""
    qkv, lengths = empty(1, 64, 3, 1, head_dim, dtype=dtype), empty(2, 1)
    rotation = empty(64, head_dim // 2, dtype=torch.complex64)
    x, epsilons = empty(1, 64, width), (qk_norm_rope_torch.EPSILON, modulate_torch.EPSILON)
    short, condition = TYPES[dtype], x[:, :1]
    norms = list_launches(f"norm, rope {short}", qk_norm_rope_triton, qkv, lengths, rotation, epsilons[0])
    return norms + list_launches(
        f"modulate {short}", modulate_triton, x, condition, condition, dtype, epsilons[1]
    )


def decoder_layers(dtype: torch.dtype, head_dim: int, width: int) -> list[Variant]:
    """Return the variants of a decoder layer's norm, rotation and gate kernels."""
    joint, one = empty(8, 1, 3, head_dim, dtype=dtype), empty(head_dim, dtype=dtype)
    rotation = empty(1, head_dim // 2, dtype=torch.complex64)
    x, weight, short = empty(8, 1, width, dtype=dtype), empty(width, dtype=dtype), TYPES[dtype]
    kinds = {"no": None, "RMS": (one, one, None, None), "layer": (one, one, one, one)}
    variants = []
    for kind, weights in kinds.items():
        norms = weights and qk_norm_rope_torch.HeadNorms(*weights, 1e-6)
        variants += list_launches(
            f"{kind} norm, rope {short}", grouped_norm_rope_triton, joint, 1, norms, rotation
        )
    variants += list_launches(f"RMS norm {short}", rms_norm_triton, x, None, weight, 1e-6)
    variants += list_launches(f"sum, RMS norm {short}", rms_norm_triton, x, x, weight, 1e-6)
    gate, factor = empty(8, 1, 2 * width, dtype=dtype).chunk(2, -1)
    return variants + list_launches(f"gate {short}", silu_mul_triton, gate, factor)


def image_norms(dtype: torch.dtype, weights: torch.dtype, channels: int, groups: int) -> list[Variant]:
    """Return the passes of a group norm with SiLU over an image of an image decoder."""
    x = empty(1, channels, 256, 256, dtype=dtype).to(memory_format=torch.channels_last)
    one = empty(channels, dtype=weights)
    passes = list_launches("", group_norm_triton, x, groups, one, one, 1e-6, silu=True)
    names = (f"{name} {TYPES[dtype]}" for name in ("moments", "groups", "group norm, SiLU"))
    return [variant._replace(name=name) for name, variant in zip(names, passes, strict=True)]


def draws() -> list[Variant]:
    """Return the sampling of codes, all or the top k, of candidates and of bits, and the Gumbel softmax of codes."""
    keys, step = empty(8, dtype=torch.int64), empty(1, dtype=torch.int64)
    variants = []
    for codes in (4096, 16384, 184000):
        logits = empty(8, 1, codes)
        variants += list_launches("draw", draw_codes_triton, logits, keys, step, 1.0, 0, True)
    for codes in (16384, 65536):
        logits = empty(8, 1, codes)
        variants += list_launches("draw of top-k", draw_codes_triton, logits, keys, step, 1.0, 2000, True)
    candidates = empty(8, 256), empty(8, 256, dtype=torch.int64)
    variants += list_launches("draw of few", draw_candidate_triton, *candidates, keys, step)
    variants += list_launches("bits", draw_bits_triton, empty(8, 4096, 32, 2), keys, step, 0.03)
    return variants + list_launches(
        "mix codes", gumbel_softmax_triton, empty(8, 256, 4096), keys, step, 1.5, 0.2
    )


@contextmanager
def sized_for(arch: int) -> Iterator[None]:
    """Let launchers choose tiles for a compute capability while the block runs."""
    with patch.object(tiles, "find_capability", lambda _: arch):
        yield


def list_kernels() -> Iterator[Variant]:
    """Yield every kernel in the variants of real models."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for head_dim in (64, 128, 136, 256):
        for queries, rows in ((1, 1), (64, 1), (4096, 64)):
            yield attention(bf16, head_dim, queries, rows)
            yield past(bf16, head_dim, queries, rows)
    for keys in (64, 32, 16):
        yield past(bf16, 128, 4096, 64, keys=keys)
    for keys in (32, 16):
        yield attention(bf16, 128, 4096, 64, keys=keys)
    yield past(bf16, 128, 4096, 64, resume=False)
    yield past(fp32, 64, 4096, 64)
    yield attention(bf16, 128, 4096, 64, causal=True)
    yield attention(bf16, 96, 4096, 64)
    for head_dim in (64, 128, 256):
        yield attention(fp32, head_dim, 4096, 64)
    for head_dim in (64, 128):
        yield attention(bf16, head_dim, 1, 1, causal=True)
        for queries in (1, 8):
            yield decode(bf16, head_dim, queries)
    yield decode(fp32, 64, 1)
    yield decode(fp32, 128, 1)
    yield decode(fp32, 64, 8)
    yield from planes()
    yield from mergers(bf16, 128)
    for dtype, head_dim in ((bf16, 64), (bf16, 128), (bf16, 256), (fp32, 64), (fp32, 128)):
        yield from mass(dtype, head_dim)
    yield from copy(bf16, 64)
    yield from copy(bf16, 128)
    yield from layers(bf16, 128, 2048)
    yield from decoder_layers(bf16, 128, 4096)
    yield from draws()
    yield from narrow_units()
    yield from image_decoders()


def planes() -> Iterator[Variant]:
    """Yield attention to planes of four bits, from one query to many."""
    channel = Stored(4, "channel", "token")
    for head_dim, queries in product((64, 128, 256), (1, 8, 64, 4096)):
        yield quantised(torch.bfloat16, head_dim, queries, channel)
    book = Stored(4, "codebook", "codebook")
    for queries in (1, 8, 64, 4096):
        yield quantised(torch.bfloat16, 128, queries, book, resume=True)


def narrow_units() -> Iterator[Variant]:
    """Yield the kernels of LlamaGen-3B, whose heads of 100 channels start on eight bytes."""
    bf16 = torch.bfloat16
    yield decode(bf16, 100, 1)
    yield attention(bf16, 100, 1, 1, causal=True)
    yield attention(bf16, 100, 64, 1)
    yield attention(bf16, 100, 4096, 64)
    yield from copy(bf16, 100)
    yield decoder_layers(bf16, 100, 3200)[0]


def image_decoders() -> Iterator[Variant]:
    """Yield the group norms of Infinity's and VAR's decoders under autocast, of Janus-Pro's and of LlamaGen's."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for channels in (128, 160, 512):
        yield from image_norms(bf16, fp32, channels, 32)
    yield from image_norms(torch.float16, fp32, 640, 32)
    yield from image_norms(bf16, bf16, 512, 32)
    yield from image_norms(fp32, fp32, 512, 32)
