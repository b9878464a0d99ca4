"""The machine: `task=doctor`, and every variant of every kernel compiled for the card's capability and its limits."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context

import torch

from benchmarks.compiled import SHARED, Variant, compile_variant, sized_for, variants
from benchmarks.gpu_steps.base import Case, Failed, Figures, Machine
from benchmarks.support.build import ROOT
from kvbench.runs.record.provenance import provenance

REHEARSED = 90
"""Compute capability that a rehearsal compiles for."""
FEW = ("copy bf16", "merge")
"""Kernels that the smallest rehearsal compiles."""


def list_cases(machine: Machine) -> Iterator[Case]:
    """Yield what describes the machine, then each kind of kernel."""
    yield Case("provenance", partial(provenance, machine.device, "not recorded in this step"))
    yield Case("doctor", call_doctor)
    arch, limit = find_limits(machine)
    if not machine.interpreted:
        yield Case("shared memory of a block", partial(check_limit, arch, limit))
    names = sorted({variant.name for variant in list_variants(arch)})
    for name in [name for name in names if machine.choose(True, name in (*FEW, "decode bf16"), name in FEW)]:
        yield Case(f"compile {name}", partial(compile_all, name, arch, limit))


def call_doctor() -> Figures:
    """Return what `task=doctor` says.

    Raises:
        Failed: it does not run.
    """
    command = [sys.executable, "run.py", "task=doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise Failed((done.stderr.strip().splitlines() or ["task=doctor failed"])[-1])
    return {"lines": [line.strip() for line in done.stdout.splitlines() if line.strip()]}


def find_limits(machine: Machine) -> tuple[int, int]:
    """Return the compute capability, as 90, and the bytes of shared memory that a block may have."""
    if machine.interpreted:
        return REHEARSED, SHARED[REHEARSED]
    about = torch.cuda.get_device_properties(machine.device)
    return 10 * about.major + about.minor, int(about.shared_memory_per_block_optin)


def check_limit(arch: int, limit: int) -> Figures:
    """Compare the card's shared memory with the table that the tests compile for.

    Raises:
        Failed: the table says that there is more.
    """
    if limit < SHARED.get(arch, 0):
        raise Failed(f"sm_{arch} has {limit} bytes, benchmarks/compiled.py says {SHARED[arch]}")
    return {"arch": arch, "bytes": limit}


@cache
def list_variants(arch: int) -> tuple[Variant, ...]:
    """Return every variant as launchers choose it for a capability that `compiled` knows, or for the nearest one."""
    with sized_for(arch if arch in SHARED else min(SHARED, key=lambda known: abs(known - arch))):
        return tuple(variants())


def compile_all(name: str, arch: int, limit: int) -> Figures:
    """Compile the variants of one name, in processes of their own.

    Raises:
        Failed: one needs more shared memory than there is.
    """
    count = sum(variant.name == name for variant in list_variants(arch))
    needed = [*_open_pool().map(partial(measure_shared, name, arch), range(count))]
    if max(needed) > limit:
        raise Failed(f"needs {max(needed)} bytes of shared memory a block, the card has {limit}")
    return {"variants": count, "shared_bytes": max(needed)}


@cache
def _open_pool() -> ProcessPoolExecutor:
    """Return processes that compile, for all kernels the same: each imports torch first."""
    return ProcessPoolExecutor(min(8, os.cpu_count() or 1), get_context("spawn"))


def measure_shared(name: str, arch: int, number: int) -> int:
    """Compile one variant and return its bytes of shared memory."""
    alike = [variant for variant in list_variants(arch) if variant.name == name]
    return compile_variant(alike[number], arch).shared
