"""Compiled Triton kernels: registers, spills, shared memory, matrix and copy instructions.

No GPU is needed: kernels are compiled ahead of time for the H100/H200 (sm_90) and the A100 (sm_80).
python -m benchmarks compiled [--only attention] [--arch 90 80]
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.support.plane_cases import FORMS, Stored, equal_rows, make_plane
from benchmarks.support.table import Table
from kvbench.kernels import modulate, qk_norm_rope
from kvbench.kernels.triton import attention_mass as attention_mass_triton
from kvbench.kernels.triton import compact as compact_triton
from kvbench.kernels.triton import decode_attention as decode_attention_triton
from kvbench.kernels.triton import modulate as modulate_triton
from kvbench.kernels.triton import past_attention as past_attention_triton
from kvbench.kernels.triton import qk_norm_rope as qk_norm_rope_triton
from kvbench.kernels.triton import quantised_attention as quantised_attention_triton
from kvbench.kernels.triton import ragged_attention as ragged_attention_triton
from kvbench.kernels.triton import softmax as softmax_triton
from kvbench.kernels.triton.launch import UNIT

TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "u8",
    torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip

HIDDEN = ("UNIT", "BLOCK_D", "STAGES", "PRECISION")
"""Constants that the table leaves out."""
COPY = "ttg.async_copy_global_to_local|ttng.async_tma_copy_global_to_local"


class Variant(NamedTuple):
    """One kernel as one generation uses it.

    Attributes:
        name: for the table.
        kernel: the jitted function.
        signature: types of the arguments that carry none in the kernel; pointers are taken to be aligned.
        constants: compile-time arguments.
        options: `num_warps`, `num_stages`.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]


@dataclass
class Compiled:
    """What came out; `copies` are asynchronous ones, per loop, outermost loops in order, by threads or descriptors."""

    registers: int
    spilled: int
    shared: int
    matrix: int
    copies: tuple[int, ...]
    while_loops: int


def attention(
    dtype: torch.dtype,
    head_dim: int,
    queries: int,
    rows: int,
    *,
    causal: bool = False,
    keys: int | None = None,
) -> Variant:
    """The attention that so many queries on so many rows would use, or that of `keys` in a tile."""
    short = TYPES[dtype]
    sizes = ragged_attention_triton.tile(head_dim, dtype, queries, rows, torch.device("cpu"))
    sizes = sizes._replace(keys=keys or sizes.keys)
    pointers = dict.fromkeys(("q", "k", "v", "past_keys", "past_values", "out"), f"*{short}")
    pointers |= {"partial": "*fp32", "lse": "*fp32", "offsets": "*i64", "lengths": "*i32", "order": "*i32"}
    constants = {
        "UNIT": UNIT, "HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_M": sizes.queries,
        "BLOCK_N": sizes.keys, "CAUSAL": causal, "PRECISION": "ieee" if short == "fp32" else "tf32",
    }  # fmt: skip
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages}
    return Variant(
        f"attention {short}", ragged_attention_triton.attention_kernel, pointers, constants, options
    )


def past(
    dtype: torch.dtype,
    head_dim: int,
    queries: int,
    rows: int,
    *,
    keys: int | None = None,
    resume: bool = True,
) -> Variant:
    """The attention over the past that so many queries on so many rows would use, or that of `keys` in a tile."""
    short = TYPES[dtype]
    sizes = ragged_attention_triton.tile(head_dim, dtype, queries, rows, torch.device("cpu"))
    sizes = past_attention_triton.with_keys(sizes, keys or past_attention_triton.most_keys(sizes, head_dim))
    block = triton.next_power_of_2(head_dim)
    pointers = {"q": f"*{short}", "out": f"*{short}", "partial": "*fp32", "state": "*fp32", "lse": "*fp32"}
    pointers |= dict.fromkeys(("past_keys", "past_values"), f"tensordesc<{short}[{sizes.keys},{block}]>")
    pointers |= {"offsets": "*i64", "lengths": "*i32", "order": "*i32"}
    constants = {
        "UNIT": UNIT, "HEAD_DIM": head_dim, "BLOCK_D": block, "BLOCK_M": sizes.queries, "BLOCK_N": sizes.keys,
        "RESUME": resume, "PRECISION": "ieee" if short == "fp32" else "tf32",
    }  # fmt: skip
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages}
    return Variant(f"past {short}", past_attention_triton.past_kernel, pointers, constants, options)


def decode(dtype: torch.dtype, head_dim: int, queries: int) -> Variant:
    """The attention of one new token whose key and value so many query heads share."""
    short, sizes = TYPES[dtype], decode_attention_triton.tile(head_dim, dtype, queries)
    pointers = dict.fromkeys(("q", "k", "v", "past_keys", "past_values", "out"), f"*{short}")
    pointers |= {"partial": "*fp32", "lse": "*fp32", "order": "*i32", "lengths": "*i32"}
    pointers |= {"offsets": "*i64", "filled": "*i64"}
    constants = {
        "UNIT": UNIT, "HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_M": sizes.queries,
        "BLOCK_N": sizes.keys, "STAGES": sizes.stages, "PRECISION": "ieee" if short == "fp32" else "tf32",
    }  # fmt: skip
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages}
    return Variant(f"decode {short}", decode_attention_triton.decode_kernel, pointers, constants, options)


def quantised(
    dtype: torch.dtype, head_dim: int, queries: int, form: Stored, *, rotated: bool = False
) -> Variant:
    """The attention that so many queries on each of 64 rows use over a plane with a rotation in 16 bits."""
    short = TYPES[dtype]
    sizes = quantised_attention_triton.tile(head_dim, dtype, queries, 64, torch.device("cpu"))
    plane = make_plane(form, equal_rows(1, 1), 1, head_dim, block=1, rotated=rotated)
    pointers = dict.fromkeys(("q", "out"), f"*{short}") | {"rotation": "*i32", "positions": "*i64"}
    pointers |= dict.fromkeys(("partial", "state", "lse"), "*fp32")
    pointers |= {"offsets": "*i64", "lengths": "*i32", "order": "*i32"}
    for codes, names in (
        (plane.keys, ("keys", "key_table", "key_entry")),
        (plane.values, ("values", "value_table", "value_entry")),
    ):
        found = quantised_attention_triton.read_source(codes).tensors
        pointers |= {name: f"*{TYPES[tensor.dtype]}" for name, tensor in zip(names, found, strict=True)}
    constants = {
        "UNIT": UNIT, "HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_H": triton.next_power_of_2(head_dim // 2), "BLOCK_M": sizes.queries, "BLOCK_N": sizes.keys,
        "STAGES": sizes.stages, "RESUME": False, "PRECISION": "ieee" if short == "fp32" else "tf32",
        **quantised_attention_triton.list_formats(plane),
    }  # fmt: skip
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages}
    return Variant(
        f"{form.name} {short}", quantised_attention_triton.quantised_kernel, pointers, constants, options
    )


def merge(dtype: torch.dtype, head_dim: int) -> Variant:
    """The merge of split attentions."""
    pointers = {"partial": "*fp32", "partial_lse": "*fp32", "out": f"*{TYPES[dtype]}", "lse": "*fp32"}
    constants = {
        "UNIT": UNIT,
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_M": 16,
    }
    return Variant("merge", softmax_triton.merge_kernel, pointers, constants, {})


def merge_pair(dtype: torch.dtype, head_dim: int) -> Variant:
    """The merge of two attentions."""
    pointers = {"out": f"*{TYPES[dtype]}", "lse": "*fp32", "more": f"*{TYPES[dtype]}", "more_lse": "*fp32"}
    constants = {
        "UNIT": UNIT,
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_M": 16,
    }
    return Variant("merge of two", softmax_triton.pair_kernel, pointers, constants, {})


def mass(dtype: torch.dtype, head_dim: int) -> Iterator[Variant]:
    """Both passes of the attention that keys receive."""
    short = TYPES[dtype]
    pointers = dict.fromkeys(("q", "k", "past_keys"), f"*{short}")
    pointers |= {
        "lse": "*fp32",
        "token": "*i32",
        "mass": "*fp32",
        "offsets": "*i64",
        "lengths": "*i32",
        "order": "*i32",
    }
    block, keys, warps = attention_mass_triton.block_sizes(head_dim, dtype)
    constants = {
        "UNIT": UNIT, "HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_M": block,
        "BLOCK_N": keys, "CAUSAL": False, "PRECISION": "ieee" if short == "fp32" else "tf32",
    }  # fmt: skip
    yield Variant(
        f"sums {short}", attention_mass_triton.sum_kernel, pointers, constants, {"num_warps": warps}
    )
    yield Variant(
        f"mass {short}",
        attention_mass_triton.mass_kernel,
        pointers,
        constants | {"POWER": 1},
        {"num_warps": warps},
    )


def copy(dtype: torch.dtype, head_dim: int) -> Variant:
    """The rebuild of keys and values."""
    short = TYPES[dtype]
    pointers = dict.fromkeys(("keys", "values", "k", "v", "new_keys", "new_values"), f"*{short}")
    constants = {"UNIT": UNIT, "HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim)}
    constants |= {"BLOCK": compact_triton.BLOCK, "BOTH": True}
    return Variant(f"copy {short}", compact_triton.copy_kernel, pointers | {"source": "*i32"}, constants, {})


def layers(dtype: torch.dtype, head_dim: int, width: int) -> Iterator[Variant]:
    """What stands between a layer's matrix products."""
    short, integers = TYPES[dtype], dict.fromkeys(("tokens", "heads", "factor_stride", "shift_stride"), "i32")
    pointers = {"qkv": f"*{short}", "lengths": "*fp32", "rotation": "*fp32"}
    constants = {
        "DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_T": qk_norm_rope_triton.BLOCK_T,
        "ROTATE": True, "EPSILON": qk_norm_rope.EPSILON,
    }  # fmt: skip
    yield Variant(
        f"norm, rope {short}", qk_norm_rope_triton.norm_rope_kernel, integers | pointers, constants, {}
    )
    pointers = {"x": "*fp32", "factor": "*fp32", "shift": "*fp32", "out": f"*{short}"}
    block = triton.next_power_of_2(width)
    constants = {"WIDTH": width, "BLOCK": block, "EPSILON": modulate.EPSILON}
    warps = {"num_warps": modulate_triton.count_warps(block)}
    yield Variant(f"modulate {short}", modulate_triton.modulate_kernel, integers | pointers, constants, warps)


def variants() -> Iterator[Variant]:
    """Every kernel, in the forms that real models use."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for head_dim in (64, 128, 256):
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
    yield merge(bf16, 128)
    for queries in (1, 8, 4096):
        yield quantised(bf16, 128, queries, FORMS[1], rotated=True)
    yield merge_pair(bf16, 128)
    for dtype, head_dim in ((bf16, 64), (bf16, 128), (bf16, 256), (fp32, 64), (fp32, 128)):
        yield from mass(dtype, head_dim)
    yield copy(bf16, 64)
    yield copy(bf16, 128)
    yield from layers(bf16, 128, 2048)


def compile_variant(variant: Variant, arch: int) -> Compiled:
    """Compiles for one architecture (80 or 90) and reads the results."""
    kernel, constants = variant.kernel, variant.constants
    signature = {
        p.name: "constexpr" if p.name in constants else p.annotation_type or variant.signature[p.name]
        for p in kernel.params
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    result = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options=variant.options | {"enable_fp_fusion": True}
    )
    ptx, ir = result.asm["ptx"], result.asm["ttgir"]
    usage = resources(result.asm["cubin"])
    return Compiled(
        registers=_number(r"REG:(\d+)", usage),
        spilled=_number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage),
        shared=result.metadata.shared,
        matrix=len(re.findall(r"wgmma\.mma_async|mma\.sync", ptx)),
        copies=tuple(len(re.findall(COPY, body)) for body in loops(ir)),
        while_loops=ir.count("scf.while"),
    )


def resources(cubin: bytes) -> str:
    """What the disassembler that comes with Triton says of a program: its registers, its stack."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(program), "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loops(ir: str) -> Iterator[str]:
    """Bodies of the outermost counted loops."""
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
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern!r} in: {text}")
    return int(found[1])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--arch", type=int, nargs="+", default=[90, 80])


def main(options: argparse.Namespace) -> None:
    """Print the table."""
    counts = dict.fromkeys(("warps", "regs", "spills", "shared", "matrix"), "d")
    columns = {"sm": "d", f"{'constants':44}": "44"} | counts | {"copies in loops": "s", "while": "d"}
    table = Table(columns, "kernel")
    for variant in variants():
        if options.only not in variant.name:
            continue
        shown = {k: v for k, v in variant.constants.items() if k not in HIDDEN}
        constants = " ".join(f"{name}={value}" for name, value in shown.items())
        for arch in options.arch:
            out = compile_variant(variant, arch)
            usage = (variant.options.get("num_warps", 4), out.registers, out.spilled, out.shared, out.matrix)
            copies = "+".join(map(str, out.copies)) or "-"
            table.add(variant.name, arch, constants, *usage, copies, out.while_loops)
