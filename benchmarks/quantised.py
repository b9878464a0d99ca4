"""Attention over low-bit keys and values: time, bytes per token, and compiled kernels.

python -m benchmarks quantised [--repeats 5] [--only tiny]        processor time of one thread, calls in turns
python -m benchmarks quantised --device cuda --more 16            time on a GPU, 16 times as many sequences
python -m benchmarks quantised --bytes [--dim 128] [--block 64]   bytes and arithmetic intensity
python -m benchmarks quantised --compiled [--dims 64 128]         registers, spills and copies on sm_90; no GPU needed
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.support.arguments import Option
from benchmarks.support.build import build_model, composed
from benchmarks.support.kernel_cases import Inputs, Timer
from benchmarks.support.plane_cases import FORMS, PLAIN, Stored, equal_rows, make_plane
from benchmarks.support.table import Table
from benchmarks.support.timing import choose_clock, take_turns
from kvbench.kernels.planes import Codes, Plane
from kvbench.kernels.quantised_attention import quantised_attention

FLOPS, BANDWIDTH = 989e12, 4800e9
"""Dense bf16 operations and bytes per second of an H200, by its data sheet."""
HALF = Stored(16, "plain", "plain")


class Case(NamedTuple):
    """One layer's attention: sequences, rows per sequence, queries and cached tokens per row, channels, block size."""

    batch: int
    rows: int
    queries: int
    past: int
    channels: int
    block: int


def list_cases() -> dict[str, Case]:
    """Return the last scale of the embedded model, a middle one of Infinity-2B, and a step of Qwen3-4B."""
    tiny, large = (build_model(name).spec for name in ("infinity_tiny", "infinity_2b"))
    small, middle = tiny.segments[-1], large.segments[8]
    config = composed(["model=qwen3_4b"])["model"]["transformer"]
    groups = config["heads"] // config["kv_heads"]
    return {
        "infinity_tiny": Case(16, tiny.heads, small.length, small.start, tiny.head_dim, 64),
        "infinity_2b": Case(2, large.heads, middle.length, middle.start, large.head_dim, 256),
        "qwen3_4b": Case(1, config["kv_heads"], groups, 4096, config["head_dim"], 128),
    }


def time_calls(calls: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, float]:
    """Return the median seconds of calls; on a CPU processor time, of calls in turns after a warm-up."""
    if torch.device(device).type == "cuda":
        timer, unused = Timer(device, repeats), Inputs(*[torch.empty(0)] * 5)
        return {name: timer(lambda _, call=call: call(), [unused]) for name, call in calls.items()}  # type: ignore[misc]
    return {name: timed.seconds for name, timed in take_turns(calls, repeats, choose_clock(True)).items()}


def print_times(case: Case, repeats: int, device: str) -> None:
    """Print the time of attention over planes, relative to 32-bit numbers, on a GPU to 16-bit numbers."""
    gpu = torch.device(device).type == "cuda"
    baseline = HALF if gpu else PLAIN
    layout = equal_rows(case.rows, case.past)
    q = torch.randn(case.batch, case.rows, case.queries, case.channels)
    q = q.bfloat16() if gpu else q
    calls: dict[str, Callable[[], object]] = {}
    for form in (HALF, *FORMS) if gpu else (PLAIN, HALF, *FORMS):
        plane = make_plane(form, layout, case.batch, case.channels, block=case.block, rotated=True)
        if gpu and plane.rotation is not None:
            plane = plane._replace(rotation=plane.rotation.to(torch.complex32))
        calls[form.name] = partial(quantised_attention, q, plane, case.channels**-0.5)
    times = time_calls(calls, repeats, device)
    print(
        f"{case.batch} x {case.rows} rows of {case.past} tokens, {case.queries} queries each, {case.channels} channels"
    )
    table = Table({"ms": ".2f", f"of {baseline.name}": ".2f"})
    for name, seconds in times.items():
        table.add(name, 1e3 * seconds, seconds / times[baseline.name])


class Bytes(NamedTuple):
    """Bytes of a token of a head: codes, scales of a sequence, and tables that all sequences share."""

    codes: float
    scales: float
    tables: float


def count_bytes(plane: Plane) -> Bytes:
    """Count the bytes that the kernel reads, with a rotation in 16 bits."""

    def size(*tensors: Tensor | None) -> float:
        return sum(x.nbytes for x in tensors if x is not None) / plane.layout.total

    pair: tuple[Codes, Codes] = plane.keys, plane.values
    tables = size(*(codes.entry for codes in pair))
    if plane.rotation is not None:
        tables += plane.positions.element_size() + 2 * 2 * plane.rotation.shape[1]
    return Bytes(
        size(*(x.numbers for x in pair)), size(*(y for x in pair for y in (x.affine, x.gain))), tables
    )


def print_bytes(channels: int, block: int) -> None:
    """Print bytes and arithmetic intensities; the scales of a block are divided by its tokens."""
    ridge = FLOPS / BANDWIDTH
    print(
        f"{channels} channels, blocks of {block} tokens, rotation in 16 bits; operations per byte of codes and scales; "
        f"at {ridge:.0f} an H200 takes as long to compute as to read"
    )
    columns = {"codes, B": ".0f", "scales, B": ".1f", "of 16 bits": ".3f", "tables, B": ".0f"}
    columns |= {"1 query": ".1f", "8 queries": ".1f", f"queries for {ridge:.0f}": ".0f"}
    table = Table(columns)
    for form in (HALF, *FORMS):
        plane = make_plane(form, equal_rows(1, block), 1, channels, block=block, rotated=True)
        size = count_bytes(plane)
        total = size.codes + size.scales
        intensity = 4 * channels / total
        bytes_read = size.codes, size.scales, total / (4 * channels), size.tables
        table.add(form.name, *bytes_read, intensity, 8 * intensity, ridge / intensity)


def print_compiled(dims: list[int]) -> None:
    """Print the resources of the kernel compiled for sm_90, with queries in bfloat16, for each tile."""
    from benchmarks.compiled import compile_variant, quantised

    shapes = [(dim, queries) for dim in dims for queries in (1, 8, 4096)]
    cases = [(FORMS[index], False) for index in (1, 2, 3, 5, 6, 9)] + [(FORMS[1], True), (FORMS[6], True)]
    print("registers, bytes spilled, KiB of shared memory; asynchronous copies in the loop")
    columns = {f"  {f'{dim}, {queries}':>16}": "s" for dim, queries in shapes}
    table = Table(columns, "D, queries of a row", 24)
    for form, rotated in cases:
        cells = []
        for dim, queries in shapes:
            out = compile_variant(quantised(torch.bfloat16, dim, queries, form, rotated=rotated), 90)
            copies = "+".join(map(str, out.copies))
            cells.append(f"{out.registers}, {out.spilled}, {out.shared / 1024:.0f}; {copies}")
        table.add(f"{form.name}{', rotated' if rotated else ''}", *cells)


OPTIONS = {
    "repeats": 5, "device": "auto", "threads": 1,
    "only": Option("", "shapes whose name contains this"),
    "more": Option(1, "factor on the sequences, so that they exceed the caches of a GPU"),
    "bytes": Option(False, "print bytes instead of times"),
    "dim": Option(128, "channels of a head, for --bytes"),
    "block": Option(64, "tokens that share a channel's scale"),
    "compiled": Option(False, "compile the kernel instead of timing it"),
    "dims": Option([64, 128], "channels of a head, for --compiled"),
}  # fmt: skip


@torch.inference_mode()
def main(options: argparse.Namespace) -> None:
    """Print the requested tables.

    Raises:
        ValueError: no shape is chosen.
    """
    if options.compiled:
        print_compiled(options.dims)
    elif options.bytes:
        print_bytes(options.dim, options.block)
    else:
        with torch.device(options.device):
            cases = {name: case for name, case in list_cases().items() if options.only in name}
            if not cases:
                raise ValueError(
                    f"--only {options.only}: in the name of no shape of {', '.join(list_cases())}"
                )
            for name, case in cases.items():
                print(f"\n{name}: ", end="")
                more = case._replace(batch=options.more * case.batch)
                print_times(more, options.repeats, options.device)
