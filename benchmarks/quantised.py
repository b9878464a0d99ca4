"""Attention over keys and values in few bits: seconds on a CPU, bytes of a token, and what compilers make of it.

python -m benchmarks quantised [--repeats 5] [--only tiny]        processor seconds of one thread, calls in turns
python -m benchmarks quantised --device cuda --more 16            seconds on a GPU, 16 times as many sequences
python -m benchmarks quantised --bytes [--dim 128] [--block 64]   bytes and arithmetic intensity, counted
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
from benchmarks.support.timing import choose_clock, take_turns
from kvbench.kernels.planes import Codes, Plane
from kvbench.kernels.quantised_attention import quantised_attention

FLOPS, BANDWIDTH = 989e12, 4800e9
"""An H200's data sheet: dense operations a second in bf16, bytes a second."""
HALF = Stored(16, "plain", "plain")


class Case(NamedTuple):
    """One layer's attention: sequences, rows of each, queries of a row, tokens that each row holds, channels, block."""

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
    words = composed(["model=qwen3_4b"])["model"]["transformer"]
    groups = words["heads"] // words["kv_heads"]
    return {
        "infinity_tiny": Case(16, tiny.heads, small.length, small.start, tiny.head_dim, 64),
        "infinity_2b": Case(2, large.heads, middle.length, middle.start, large.head_dim, 256),
        "qwen3_4b": Case(1, words["kv_heads"], groups, 4096, words["head_dim"], 128),
    }


def time_calls(calls: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, float]:
    """Return the median seconds of calls; on a CPU the processor's, of calls that take turns after one not counted."""
    if torch.device(device).type == "cuda":
        timer, nothing = Timer(device, repeats), Inputs(*[torch.empty(0)] * 5)
        return {name: timer(lambda _, call=call: call(), [nothing]) for name, call in calls.items()}  # type: ignore[misc]
    return {name: found.seconds for name, found in take_turns(calls, repeats, choose_clock(True)).items()}


def print_times(case: Case, repeats: int, device: str) -> None:
    """Print the time of attention over planes beside that over numbers of 32 bits, on a GPU of 16."""
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
    found = time_calls(calls, repeats, device)
    print(
        f"{case.batch} x {case.rows} rows of {case.past} tokens, {case.queries} queries each, {case.channels} channels"
        f"\n\n| | ms | of {baseline.name} |\n|---|---|---|"
    )
    for name, seconds in found.items():
        print(f"| {name} | {1e3 * seconds:.2f} | {seconds / found[baseline.name]:.2f} |")


class Bytes(NamedTuple):
    """Bytes of a token of a head: codes; scales that belong to a sequence; tables that all sequences read."""

    codes: float
    scales: float
    tables: float


def count_bytes(plane: Plane, turn: int) -> Bytes:
    """Count what the kernel reads, `turn` bytes for each channel of a rotation."""

    def size(*tensors: Tensor | None) -> float:
        return sum(x.nbytes for x in tensors if x is not None) / plane.layout.total

    pair: tuple[Codes, Codes] = plane.keys, plane.values
    tables = size(*(codes.entry for codes in pair))
    if plane.rotation is not None:
        tables += plane.positions.element_size() + turn * 2 * plane.rotation.shape[1]
    return Bytes(size(*(x.numbers for x in pair)), size(*(x.affine for x in pair)), tables)


def print_bytes(channels: int, block: int) -> None:
    """Print bytes and arithmetic intensities; a block's scales are divided among its tokens."""
    ridge = FLOPS / BANDWIDTH
    print(
        f"{channels} channels, blocks of {block} tokens, rotation in 16 bits; operations per byte of codes and scales; "
        f"{ridge:.0f} is where an H200 computes as long as it reads\n\n"
        "| | codes, B | scales, B | of 16 bits | tables, B | 1 query | 8 queries | queries for "
        f"{ridge:.0f} |\n|---|---|---|---|---|---|---|---|"
    )
    for form in (HALF, *FORMS):
        plane = make_plane(form, equal_rows(1, block), 1, channels, block=block, rotated=True)
        found = count_bytes(plane, 2)
        own = found.codes + found.scales
        each = 4 * channels / own
        print(
            f"| {form.name} | {found.codes:.0f} | {found.scales:.1f} | {own / (4 * channels):.3f} | {found.tables:.0f} "
            f"| {each:.1f} | {8 * each:.1f} | {ridge / each:.0f} |"
        )


def print_compiled(dims: list[int]) -> None:
    """Print what the compiler makes of the kernel for sm_90, queries in bfloat16, for each tile that is used."""
    from benchmarks.compiled import compile_variant, quantised

    shapes = [(dim, queries) for dim in dims for queries in (1, 8, 4096)]
    int4, int3, int2, token, book, float8 = (FORMS[place] for place in (1, 2, 3, 5, 6, 9))
    chosen = [(form, False) for form in (int4, int3, int2, token, book, float8)] + [
        (int4, True),
        (book, True),
    ]
    print("registers, bytes spilled, KiB of shared memory; asynchronous copies in the loop\n")
    print(f"| D, queries of a row | {' | '.join(f'{dim}, {queries}' for dim, queries in shapes)} |")
    print("|---" * (len(shapes) + 1) + "|")
    for form, rotated in chosen:
        cells = []
        for dim, queries in shapes:
            out = compile_variant(quantised(torch.bfloat16, dim, queries, form, rotated=rotated), 90)
            copies = "+".join(map(str, out.copies))
            cells.append(f"{out.registers}, {out.spilled}, {out.shared / 1024:.0f}; {copies}")
        print(f"| {form.name}{', rotated' if rotated else ''} | {' | '.join(cells)} |", flush=True)


OPTIONS = {
    "repeats": 5, "device": "auto", "threads": 1,
    "only": Option("", "shapes whose name contains this"),
    "more": Option(1, "times the sequences, so that no cache of a GPU holds them"),
    "bytes": Option(False, "count bytes instead"),
    "dim": Option(128, "channels of a head, of what is counted"),
    "block": Option(64, "tokens that share a channel's scale"),
    "compiled": Option(False, "compile the kernel instead"),
    "dims": Option([64, 128], "channels of a head, of what is compiled"),
}  # fmt: skip


@torch.inference_mode()
def main(options: argparse.Namespace) -> None:
    """Print the requested tables."""
    if options.compiled:
        print_compiled(options.dims)
    elif options.bytes:
        print_bytes(options.dim, options.block)
    else:
        with torch.device(options.device):
            for name, case in list_cases().items():
                if options.only in name:
                    print(f"\n{name}: ", end="")
                    more = case._replace(batch=options.more * case.batch)
                    print_times(more, options.repeats, options.device)
