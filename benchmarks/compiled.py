"""Resources of compiled Triton kernels: registers, spills, shared memory, matrix and copy instructions.

No GPU is needed: kernels are compiled ahead of time for the A100 (80), RTX 30 and A10 (86), RTX 40 and L40S (89),
H100/H200 (90), B200 (100) and RTX 50 (120). The exit status is 1 if a kernel exceeds the shared memory or spills more
than 64 bytes of registers, or 256 with more than 128 channels; attention in float32, which no default run on a GPU
computes, may spill. `--models` adds the variants that default runs of models launch, and all low-bit storage.
python -m benchmarks compiled [--only attention] [--arch 90 80] [--models infinity_2b qwen3_4b] [--summary]
"""

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass
from math import inf
from operator import itemgetter
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.support.arguments import Option
from benchmarks.support.default_runs import list_launched
from benchmarks.support.kernel_variants import list_kernels, sized_for
from benchmarks.support.table import Table
from benchmarks.support.triton_launches import Variant

SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Maximum bytes of shared memory per block, by compute capability (CUDA's programming guide)."""

HIDDEN_CONSTANTS = ("UNIT", "BLOCK_D", "STAGES", "PRECISION")
"""Constants of Triton kernels that the table omits."""
COPY_PATTERN = "ttg.async_copy_global_to_local|ttng.async_tma_copy_global_to_local"


@dataclass
class Compiled:
    """Result of a compilation; `copies` counts the asynchronous copies of each outermost loop."""

    registers: int
    spilled: int
    shared: int
    matrix: int
    copies: tuple[int, ...]
    while_loops: int


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
    """Return the registers and stack bytes of a compiled kernel, as printed by Triton's disassembler."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(program), "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def list_loops(ir: str) -> list[str]:
    """Return the outermost counted loops of a kernel's intermediate representation; a loop ends at its own indent."""
    return [loop[0] for loop in re.finditer(r"^( *)\S[^\n]*scf\.for.*?\n\1\}", ir, re.MULTILINE | re.DOTALL)]


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"no {pattern!r} in: {text}")
    return int(match[1])


OPTIONS = {
    "only": Option("", "kernels whose name contains this"),
    "arch": Option([90, 80], "compute capabilities", choices=SHARED),
    "models": Option([], "models of conf/model, or `all`"),
    "summary": Option(False, "end with a line of Markdown for each capability"),
}


def main(options: argparse.Namespace) -> int:
    """Print the table; return 1 if a kernel does not fit or spills too much.

    Raises:
        ValueError: no kernel is chosen.
    """
    counts = dict.fromkeys(("warps", "regs", "spills", "shared", "matrix"), "d")
    columns = {"sm": "d", f"  {'constants':44}": "46"} | counts | {"copies in loops": "s", "while": "d"}
    table, lines, faulty = Table(columns, "kernel"), [], False
    for arch in options.arch:
        with sized_for(arch):
            listed = {variant.source: variant for variant in list_kernels()}
            listed = list_launched(options.models) | listed
        variants = [variant for variant in listed.values() if options.only in variant.name]
        if not variants:
            raise ValueError(f"--only {options.only}: matches no kernel; leave it out to compile all")
        found = []
        for variant in variants:
            shown = {k: v for k, v in variant.constants.items() if k not in HIDDEN_CONSTANTS}
            constants = "  " + " ".join(f"{name}={value}" for name, value in shown.items())
            out = compile_variant(variant, arch)
            usage = (variant.options.get("num_warps", 4), out.registers, out.spilled, out.shared, out.matrix)
            copies = "+".join(map(str, out.copies)) or "-"
            table.add(variant.name, arch, constants, *usage, copies, out.while_loops)
            faulty |= out.shared > SHARED[arch] or out.spilled > limit_spills(variant)
            found.append((out.spilled, variant, out.shared))
        lines.append(summarise(arch, found))
    if options.summary:
        print(*lines, sep="\n")
    return int(faulty)


def limit_spills(variant: Variant) -> float:
    """Return the maximum bytes of registers that a variant may spill."""
    if variant.signature.get("q") == "*fp32":
        return inf
    return 64 if variant.constants.get("HEAD_DIM", 0) <= 128 else 256


def summarise(arch: int, found: list[tuple[int, Variant, int]]) -> str:
    """Return a row of docs/gpu.md for a capability; `found` has (spilled bytes, variant, shared-memory bytes)."""
    spilled, worst, _ = max(found, key=itemgetter(0))
    sizes = (worst.constants.get(name) for name in ("HEAD_DIM", "BLOCK_M", "BLOCK_N"))
    where = ", `{}`, {} channels, tiles of {} x {}".format(worst.name, *sizes) if spilled else ""
    spilling, largest = sum(row[0] > 0 for row in found), max(row[2] for row in found)
    return f"| {arch} | {len(found)} | {largest} | {SHARED[arch]} | {spilling} | {spilled}{where} |"
