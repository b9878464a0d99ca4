"""Step that describes the machine and compiles every kernel variant for the GPU's capability and limits."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context

import torch

from benchmarks.compiled import SHARED, compile_variant
from benchmarks.gpu_steps.base import Case, Failed, Figures, Machine, call_python
from benchmarks.support.kernel_variants import list_kernels, sized_for
from benchmarks.support.triton_launches import Variant
from kvbench.runs.record.provenance import provenance

REHEARSED_ARCH = 90
"""Compute capability that a rehearsal compiles for."""
FEW_KERNELS = ("copy bf16", "merge")
"""Kernels that the smallest rehearsal compiles, by beginnings of their names."""


def list_cases(machine: Machine) -> Iterator[Case]:
    """Yield the description of the machine, then each kind of kernel."""
    yield Case("provenance", partial(provenance, machine.device, "not recorded in this step"))
    yield Case("doctor", call_doctor)
    arch, limit = find_limits(machine)
    if not machine.interpreted:
        yield Case("shared memory of a block", partial(check_limit, arch, limit))
    names = sorted({variant.name for variant in list_variants(arch)})
    for name in machine.choose(names, [*FEW_KERNELS, "decode bf16"], FEW_KERNELS):
        yield Case(f"compile {name}", partial(compile_all, name, arch, limit))


def call_doctor() -> Figures:
    """Return the printed lines of `task=doctor`."""
    [printed] = call_python(["run.py", "task=doctor"])
    return {"lines": [line.strip() for line in printed.splitlines() if line.strip()]}


def find_limits(machine: Machine) -> tuple[int, int]:
    """Return the compute capability, such as 90, and the maximum bytes of shared memory per block."""
    if machine.interpreted:
        return REHEARSED_ARCH, SHARED[REHEARSED_ARCH]
    properties = torch.cuda.get_device_properties(machine.device)
    return 10 * properties.major + properties.minor, int(properties.shared_memory_per_block_optin)


def check_limit(arch: int, limit: int) -> Figures:
    """Check that `SHARED`, by which tests compile, has no more shared memory than the GPU."""
    if limit < SHARED.get(arch, 0):
        raise Failed(f"sm_{arch} has {limit} bytes, benchmarks/compiled.py says {SHARED[arch]}")
    return {"arch": arch, "bytes": limit}


@cache
def list_variants(arch: int) -> tuple[Variant, ...]:
    """Return every variant as chosen by launchers for a capability, or for the nearest known one."""
    with sized_for(arch if arch in SHARED else min(SHARED, key=lambda known: abs(known - arch))):
        return tuple(list_kernels())


def compile_all(name: str, arch: int, limit: int) -> Figures:
    """Compile the variants of one name, in other processes; each must fit the shared memory."""
    count = sum(variant.name == name for variant in list_variants(arch))
    needed = [*_open_pool().map(partial(measure_shared, name, arch), range(count))]
    if max(needed) > limit:
        raise Failed(f"needs {max(needed)} bytes of shared memory a block, the GPU has {limit}")
    return {"variants": count, "shared_bytes": max(needed)}


@cache
def _open_pool() -> ProcessPoolExecutor:
    """Return the compiling processes, shared by all kernels, since each imports torch first."""
    return ProcessPoolExecutor(min(8, os.cpu_count() or 1), get_context("spawn"))


def measure_shared(name: str, arch: int, number: int) -> int:
    """Compile one variant and return its bytes of shared memory."""
    variants = [variant for variant in list_variants(arch) if variant.name == name]
    return compile_variant(variants[number], arch).shared
