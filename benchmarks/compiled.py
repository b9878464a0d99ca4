"""Resources of compiled Triton kernels: registers, spills, shared memory, matrix and copy instructions.

No GPU is needed: kernels are compiled ahead of time for the A100 (80), RTX 30 and A10 (86), RTX 40 and L40S (89),
H100/H200 (90), B200 (100) and RTX 50 (120). The exit status is 1 if a kernel exceeds the shared memory.
python -m benchmarks compiled [--only attention] [--arch 90 80]
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.support.arguments import Option
from benchmarks.support.plane_cases import Stored, equal_rows, make_plane
from benchmarks.support.table import Table
from benchmarks.support.triton_launches import replace_launches
from kvbench.kernels import modulate as modulate_torch
from kvbench.kernels import qk_norm_rope as qk_norm_rope_torch
from kvbench.kernels.layout import Past, place_rows
from kvbench.kernels.planes import halve
from kvbench.kernels.triton import quantised_attention as quantised_attention_kernel
from kvbench.kernels.triton import ragged_attention
from kvbench.kernels.triton.attention_mass import attention_mass_triton
from kvbench.kernels.triton.compact import rebuild_triton
from kvbench.kernels.triton.decode_attention import decode_attention_triton
from kvbench.kernels.triton.draw import (
    draw_bits_triton,
    draw_candidate_triton,
    draw_codes_triton,
    mix_codes_triton,
)
from kvbench.kernels.triton.group_norm import group_norm_triton
from kvbench.kernels.triton.launch import SMALL_MEMORY
from kvbench.kernels.triton.modulate import modulate_triton
from kvbench.kernels.triton.past_attention import past_attention_triton
from kvbench.kernels.triton.qk_norm_rope import grouped_norm_rope_triton, qk_norm_rope_triton
from kvbench.kernels.triton.quantised_attention import quantised_attention_triton
from kvbench.kernels.triton.ragged_attention import ragged_attention_triton
from kvbench.kernels.triton.rms_norm import rms_norm_triton
from kvbench.kernels.triton.softmax import merge_pair_triton, merge_shares
from kvbench.kernels.triton.swiglu import silu_mul_triton

TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "u8",
    torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip

SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Maximum bytes of shared memory per block, by compute capability (CUDA's programming guide)."""

HIDDEN_CONSTANTS = ("UNIT", "BLOCK_D", "STAGES", "PRECISION")
"""Constants that the table omits."""
COPY_PATTERN = "ttg.async_copy_global_to_local|ttng.async_tma_copy_global_to_local"
LONG_ROW = 1 << 16
"""Slots of a row that is long enough for the largest tiles."""


class Variant(NamedTuple):
    """One kernel with the types of its arguments, its compile-time arguments, `num_warps` and `num_stages`."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]


@dataclass
class Compiled:
    """Result of a compilation; `copies` counts the asynchronous copies of each outermost loop."""

    registers: int
    spilled: int
    shared: int
    matrix: int
    copies: tuple[int, ...]
    while_loops: int


def list_launches(name: str, launcher: Callable[..., object], *inputs: Any, **more: Any) -> list[Variant]:
    """Return the variants that a launcher launches, under one name."""
    variants = []

    def note(_: str, kernel: Any, *arguments: Any, **named: Any) -> None:
        values = dict(zip((p.name for p in kernel.params), arguments, strict=False)) | named
        constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
        signature = {
            p.name: "constexpr" if p.is_constexpr else p.annotation_type or _name_type(values[p.name])
            for p in kernel.params
        }
        options = {option: values[option] for option in ("num_warps", "num_stages") if option in values}
        variants.append(Variant(name, kernel, signature, constants, options))

    with replace_launches(note):
        launcher(*inputs, **more)
    return variants


def _name_type(value: Any) -> str:
    """Return Triton's name of the type of a pointer, a tile descriptor or a number."""
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int):
        return "i32"
    return f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}>".replace(" ", "")


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def make_past(dtype: torch.dtype, head_dim: int, rows: int, length: int = LONG_ROW) -> Past:
    """Return the past of rows of `length` slots."""
    stored = empty(1, rows * length, head_dim, dtype=dtype)
    return Past(stored, stored, equal_rows(rows, length))


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
    inputs = (q, q[:, :, :1], q[:, :, :1], place_rows(make_past(dtype, head_dim, 1), filled), 1.0)
    return list_launches(f"decode {TYPES[dtype]}", decode_attention_triton, *inputs)[0]


def quantised(
    dtype: torch.dtype, head_dim: int, queries: int, form: Stored, *, rotated: bool = False
) -> Variant:
    """Return attention of `queries` queries on each of 64 rows to a plane, with a rotation in 16 bits."""
    plane = make_plane(form, equal_rows(64, 1), 1, head_dim, block=1, rotated=rotated)
    if plane.rotation is not None:
        plane = plane._replace(rotation=halve(plane.rotation))
    q = empty(1, 64, queries, head_dim, dtype=dtype)
    return list_launches(f"{form.name} {TYPES[dtype]}", quantised_attention_triton, q, plane, 1.0)[0]


def mergers(dtype: torch.dtype, head_dim: int) -> list[Variant]:
    """Return the merge of split attention and the merge of two states."""
    out, lse = empty(1, 1, 16, head_dim, dtype=dtype), empty(1, 1, 16)
    shares = empty(2, *out.shape), empty(2, *lse.shape)
    merge = list_launches("merge", merge_shares, *shares, out)
    return merge + list_launches("merge of two", merge_pair_triton, out, lse, out, lse)


def mass(dtype: torch.dtype, head_dim: int) -> list[Variant]:
    """Return both passes of attention mass."""
    q = empty(1, 1, 64, head_dim, dtype=dtype)
    passes = list_launches("", attention_mass_triton, q, q, make_past(dtype, head_dim, 1), 1.0)
    names = (f"{name} {TYPES[dtype]}" for name in ("sums", "mass"))
    return [variant._replace(name=name) for name, variant in zip(names, passes, strict=True)]


def copy(dtype: torch.dtype, head_dim: int) -> list[Variant]:
    """Return the rebuild of keys and values."""
    pair, source = [empty(1, 64, head_dim, dtype=dtype)] * 2, empty(64, dtype=torch.int32)
    return list_launches(
        f"copy {TYPES[dtype]}", rebuild_triton, pair, [x[:, None] for x in pair], source, pair
    )


def layers(dtype: torch.dtype, head_dim: int, width: int) -> list[Variant]:
    """Return the kernels between a layer's matrix products."""
    qkv, lengths = empty(1, 64, 3, 1, head_dim, dtype=dtype), empty(2, 1)
    rotation = empty(64, head_dim // 2, dtype=torch.complex64)
    x, epsilons = empty(1, 64, width), (qk_norm_rope_torch.EPSILON, modulate_torch.EPSILON)
    short, condition = TYPES[dtype], x[:, :1]
    norms = list_launches(f"norm, rope {short}", qk_norm_rope_triton, qkv, lengths, rotation, epsilons[0])
    return norms + list_launches(
        f"modulate {short}", modulate_triton, x, condition, condition, dtype, epsilons[1]
    )


def decoder_layers(dtype: torch.dtype, head_dim: int, width: int) -> list[Variant]:
    """Return the kernels between the matrix products of a decoder layer."""
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
    """Return the draws of codes, of all and of the likeliest, of candidates and of bits, and the mixture of codes."""
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
    return variants + list_launches("mix codes", mix_codes_triton, empty(8, 256, 4096), keys, step, 1.5, 0.2)


@contextmanager
def sized_for(arch: int) -> Iterator[None]:
    """Let launchers choose tiles for a compute capability."""
    small = SHARED[arch] < SMALL_MEMORY
    with ExitStack() as stack:
        for module in (ragged_attention, quantised_attention_kernel):
            stack.enter_context(patch.object(module, "has_small_memory", lambda _: small))
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
    for head_dim, queries in product((128, 256), (1, 8, 4096)):
        yield quantised(bf16, head_dim, queries, Stored(4, "channel", "token"), rotated=True)
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


def narrow_units() -> Iterator[Variant]:
    """Yield the kernels of LlamaGen-3B, whose heads of 100 channels start on eight bytes."""
    bf16 = torch.bfloat16
    yield decode(bf16, 100, 1)
    yield attention(bf16, 100, 1, 1, causal=True)
    yield attention(bf16, 100, 64, 64)
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


def compile_variant(variant: Variant, arch: int) -> Compiled:
    """Compile a variant for one compute capability and read its resources."""
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, kind in enumerate(variant.signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(variant.kernel, variant.signature, variant.constants, aligned)
    result = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options=variant.options | {"enable_fp_fusion": True}
    )
    ptx, ir = result.asm["ptx"], result.asm["ttgir"]
    usage = read_resources(result.asm["cubin"])
    return Compiled(
        registers=_number(r"REG:(\d+)", usage),
        spilled=_number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage),
        shared=result.metadata.shared,
        matrix=len(re.findall(r"wgmma\.mma_async|mma\.sync", ptx)),
        copies=tuple(len(re.findall(COPY_PATTERN, body)) for body in list_loops(ir)),
        while_loops=ir.count("scf.while"),
    )


def read_resources(cubin: bytes) -> str:
    """Return the registers and stack of a program, from the disassembler of Triton."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(program), "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def list_loops(ir: str) -> Iterator[str]:
    """Yield the bodies of the outermost counted loops."""
    body: list[str] = []
    indent = None
    for line in ir.splitlines():
        depth = len(line) - len(line.lstrip())
        if indent is None and "scf.for" in line:
            indent, body = depth, []
        elif indent is not None and depth == indent and line.lstrip().startswith("}"):
            yield "\n".join(body)
            indent = None
        elif indent is not None:
            body.append(line)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"no {pattern!r} in: {text}")
    return int(match[1])


OPTIONS = {
    "only": Option("", "kernels whose name contains this"),
    "arch": Option([90, 80], "compute capabilities", choices=SHARED),
}


def main(options: argparse.Namespace) -> int:
    """Print the table; return 1 if a kernel does not fit.

    Raises:
        ValueError: no kernel is chosen.
    """
    counts = dict.fromkeys(("warps", "regs", "spills", "shared", "matrix"), "d")
    columns = {"sm": "d", f"  {'constants':44}": "46"} | counts | {"copies in loops": "s", "while": "d"}
    table = Table(columns, "kernel")
    too_large = False
    for arch in options.arch:
        with sized_for(arch):
            variants = [variant for variant in list_kernels() if options.only in variant.name]
        if not variants:
            raise ValueError(f"--only {options.only}: in the name of no kernel; without it, all are compiled")
        for variant in variants:
            shown = {k: v for k, v in variant.constants.items() if k not in HIDDEN_CONSTANTS}
            constants = "  " + " ".join(f"{name}={value}" for name, value in shown.items())
            out = compile_variant(variant, arch)
            usage = (variant.options.get("num_warps", 4), out.registers, out.spilled, out.shared, out.matrix)
            copies = "+".join(map(str, out.copies)) or "-"
            table.add(variant.name, arch, constants, *usage, copies, out.while_loops)
            too_large |= out.shared > SHARED[arch]
    return int(too_large)
