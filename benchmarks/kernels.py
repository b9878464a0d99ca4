"""Kernels at a model's real shapes, scale by scale: ragged attention, attention mass and rebuilds under HeatKV.

Each row also has lower bounds by operations and by bytes, at peak rates measured on this device first, and SDPA (flash
on a GPU) at equal work and on the full cache. The last line compares attention over a whole generation with SDPA on the
full cache. For a next-token model, attention of one token in the middle of every segment is measured, with the kernel
for one token and with the kernel for several.

python -m benchmarks kernels --device cuda --model infinity_2b [--budget 0.1] [--batch 8] [--quick]
python -m benchmarks kernels --device cuda --model infinity_2b --paths kernels/attention_paths.json
python -m benchmarks kernels --device cuda --model llamagen_xl [--budget 0.167] [--groups 1]
python -m benchmarks kernels --model infinity_2b --floors 989 4800   (TFLOP/s, GB/s: no device, no times)
"""

import argparse
import json
import statistics
from pathlib import Path as File
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.support import floors
from benchmarks.support.arguments import Option
from benchmarks.support.build import build_model
from benchmarks.support.floors import Ceilings, Ints
from benchmarks.support.kernel_cases import Case, HeatKVRows, Timer, measure_ceilings
from benchmarks.support.table import Table
from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, Segment
from kvbench.kernels.attention_paths import PATHS, TABLE, WHY_NOT, Shape
from kvbench.kernels.layout import list_positions

GOAL = 0.6
"""Target at 10 %: time of attention relative to SDPA on the full cache."""


class Attention(NamedTuple):
    """Seconds at one scale: bounds by operations and bytes, SDPA (full cache, equal work), ragged (three layouts)."""

    operations: float
    bytes: float
    full: float
    dense: float
    heatkv: float
    equal: float
    spread: float


def attention(
    case: Case, rows: HeatKVRows, past: Ints, peak: Ceilings, layers: range
) -> tuple[Attention, float]:
    """Return mean seconds over layers at one scale and operations of a layer; `past` int64 [L, H] has row lengths."""
    segment, spec = case.segment, case.spec
    works = [floors.attention(segment.length, past[layer] + segment.length, *case.sizes) for layer in layers]
    operations, moved = np.mean([peak.floors(work) for work in works], 0).tolist()
    mean = float(past[list(layers)].mean())
    seconds = Attention(
        operations,
        moved,
        case.dense(segment.end),
        case.dense(segment.length + round(mean)),
        statistics.fmean(case.ragged(rows.layout(layer, segment)) for layer in layers),
        case.ragged(case.lengths(np.full(spec.heads, round(mean)))),
        case.ragged(case.lengths(floors.spread(mean, spec.heads))),
    )
    return seconds, statistics.fmean(work.flops for work in works)


def show_attention(cases: list[Case], rows: HeatKVRows, past: Ints, peak: Ceilings, quick: bool) -> None:
    """Print ragged attention scale by scale, then over a whole generation."""
    print(
        "\nragged attention of a layer, ms (heatkv: mean of layers; equal, 15-fold: rows of such lengths, same mean)"
    )
    table = open_table(
        "past longest",
        "operations bytes sdpa-full sdpa-equal heatkv equal 15-fold",
        "TFLOP/s x-floor x-equal x-full",
    )
    spec = cases[0].spec
    layers = range(0, spec.layers, max(1, spec.layers // 4) if quick else 1)
    totals = []
    for case in cases:
        lengths = past[case.segment.index]
        t, operations = attention(case, rows, lengths, peak, layers)
        ratios = (operations / t.heatkv / 1e12, t.heatkv / max(t[:2]), t.heatkv / t.dense, t.heatkv / t.full)
        counts = round(float(lengths.mean())), int(lengths.max())
        table.add(name_scale(case.segment), *counts, *(1e3 * seconds for seconds in t), *ratios)
        totals.append((t.full, t.heatkv, max(t[:2])))
    full, mine, floor = (spec.layers * sum(column) for column in zip(*totals, strict=True))
    print(
        f"attention of a whole generation: {1e3 * full:.2f} ms by SDPA on the full cache, {1e3 * mine:.2f} ms with "
        f"HeatKV, {mine / full:.3f} of it (goal at 10 %: {GOAL}); floor {1e3 * floor:.2f} ms, {floor / full:.3f}"
    )


def measure_paths(cases: list[Case], rows: HeatKVRows, past: Ints) -> list[dict[str, object]]:
    """Print all attention paths scale by scale, with HeatKV's rows and with equal rows; return the milliseconds.

    Paths that cannot serve a shape are left out; each reason is printed once.
    """
    print("\nattention of the middle layer by every path, ms")
    table = open_table("past uniform", " ".join(PATHS))
    lines, reasons = [], set()
    for case in cases:
        spec, lengths = case.spec, past[case.segment.index]
        equal = case.lengths(np.full(spec.heads, round(float(lengths.mean()))))
        for layout in (rows.layout(spec.layers // 2, case.segment), equal):
            shape = Shape(
                spec.head_dim, str(case.dtype).removeprefix("torch."), case.sequences * spec.heads,
                case.segment.length, case.segment.length, layout.total // spec.heads, layout.uniform,
            )  # fmt: skip
            problems = {path: WHY_NOT[path](shape, torch.device(case.timer.device)) for path in PATHS}
            reasons |= {f"{path}: {reason}" for path, reason in problems.items() if reason}
            times = {path: 1e3 * case.ragged(layout, path) for path in PATHS if problems[path] is None}
            table.add(name_scale(case.segment), shape.past, shape.uniform, *map(times.get, PATHS))
            milliseconds = {path: float(f"{ms:.4g}") for path, ms in times.items()}
            lines.append(shape._asdict() | {"milliseconds": milliseconds})
    print("\n".join(["not measured:", *sorted(reasons)]))
    return lines


def write_paths(file: File, device: str, lines: list[dict[str, object]]) -> None:
    """Write the times of paths into a table; they replace times of the same shapes on that device."""
    table = json.loads(file.read_text()) if file.is_file() else {}
    shapes = [{**line, "milliseconds": None} for line in lines]
    others = [line for line in table.get(device, []) if {**line, "milliseconds": None} not in shapes]
    table[device] = others + lines
    file.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def show_steps(cases: list[Case], past: Ints, peak: Ceilings, groups: int) -> None:
    """Print attention of one token in the middle of each segment after the prompt; rows have HeatKV's mean length."""
    print(
        "\nattention of one token in a layer, ms (whole: no token pruned; 15-fold: rows of such lengths, same mean)"
    )
    table = open_table(
        "past mean", "bytes-whole sdpa-whole whole bytes equal 15-fold several", "x-floor several/one x-whole"
    )
    for case in cases[1:]:
        segment, spec = case.segment, case.spec
        mean, free_slots = round(float(past[segment.index].mean())), segment.length
        whole, equal = (np.full(spec.heads, length) for length in (segment.start, mean))
        works = (floors.step(rows + free_slots // 2 + 1, groups, *case.sizes) for rows in (whole, equal))
        floor = [max(peak.floors(work)) for work in works]
        layout = case.lengths(equal, free_slots)
        full, mine = (case.step(case.lengths(rows, free_slots), groups) for rows in (whole, equal))
        ragged = case.step(case.lengths(floors.spread(mean, spec.heads), free_slots), groups)
        several = case.step(layout, groups, alone=False)
        sdpa = case.dense(segment.start + free_slots // 2 + 1, groups)
        times = [1e3 * t for t in (floor[0], sdpa, full, floor[1], mine, ragged, several)]
        ratios = mine / floor[1], several / mine, mine / full
        table.add(name_scale(segment), segment.start, mean, *times, *ratios)


def show_mass(cases: list[Case], past: Ints, peak: Ceilings) -> None:
    """Print attention mass scale by scale, without the last scale, where nothing is pruned."""
    print("\nattention mass of a layer, ms (rows of equal length)")
    table = open_table("past", "operations bytes mass sdpa-equal", "x-floor x-equal")
    for case in cases[:-1]:
        segment = case.segment
        mean = round(float(past[segment.index].mean()))
        rows = np.full(case.spec.heads, mean)
        floor = peak.floors(floors.mass(segment.length, rows + segment.length, *case.sizes))
        mine, equal = case.mass(case.lengths(rows)), case.dense(mean + segment.length)
        times = [1e3 * t for t in (*floor, mine, equal)]
        table.add(name_scale(segment), mean, *times, mine / max(floor), mine / equal)


def show_rebuilds(cases: list[Case], rows: HeatKVRows, peak: Ceilings) -> None:
    """Print rebuilds scale by scale, without the last scale, where nothing is stored."""
    print("\nkeys and values of the middle layer rebuilt under HeatKV, ms")
    table = open_table("slots", "bytes rebuild", "x-floor")
    for case in cases[:-1]:
        segment, layer = case.segment, case.spec.layers // 2
        before = rows.layout(layer, segment)
        positions = list_positions(before, segment.start, segment.length)
        mine, slots = case.rebuild(before, rows.mask(layer, segment.index + 1, positions))
        floor = max(peak.floors(floors.rebuild(slots, *case.sizes)))
        table.add(name_scale(segment), slots, 1e3 * floor, 1e3 * mine, mine / floor)


def show_floors(spec: ModelSpec, past: Ints, sequences: int, peak: Ceilings) -> None:
    """Print the lower bounds of a generation in 16 bits at given rates."""
    size = (spec.head_dim, sequences, 2)
    full = np.broadcast_to(np.array([s.start for s in spec.segments])[:, None, None], past.shape)

    def attention(rows: Ints) -> list[floors.Work]:
        return [floors.attention(s.length, rows[s.index] + s.length, *size) for s in spec.segments]

    pruned = spec.segments[:-1]
    works = {
        "attention, full cache": attention(full),
        "attention, HeatKV": attention(past),
        "mass, full cache": [floors.mass(s.length, full[s.index] + s.length, *size) for s in pruned],
        "rebuilds, HeatKV": [floors.rebuild(int(past[s.index + 1].sum()), *size) for s in pruned],
    }
    print(f"{sequences} sequences, bf16, at {peak.flops / 1e12:g} TFLOP/s and {peak.bytes / 1e9:g} GB/s")
    table = Table({"operations": ".3f", "bytes": ".3f"}, "ms per generation", 24)
    for name, parts in works.items():
        table.add(name, *(1e3 * np.sum([peak.floors(part) for part in parts], 0)))


def open_table(counts: str, milliseconds: str, ratios: str = "") -> Table:
    """Start a table with a row per scale and columns of whole numbers, milliseconds and ratios."""
    formats = {counts: "d", milliseconds: ".4f", ratios: ".2f"}
    return Table({name: form for names, form in formats.items() for name in names.split()}, "scale", 12)


def name_scale(segment: Segment) -> str:
    """Return the label of a scale's row."""
    return f"{segment.index}: {segment.height}x{segment.width}"


OPTIONS = {
    "device": "auto", "model": "infinity_tiny", "budget": "0.1", "batch": 8, "repeats": 20, "threads": None,
    "groups": Option(1, "query heads per row in one-token steps"),
    "paths": Option(None, f"only measure all paths and write this table ({TABLE.name})", type=File),
    "quick": Option(False, "a quarter of the layers, five repeats"),
    "floors": Option(
        None, "print lower bounds at these rates, without timing", nargs=2, type=float, metavar=("TFLOP/s", "GB/s")
    ),
}  # fmt: skip


def main(options: argparse.Namespace) -> None:
    """Print all tables."""
    model = build_model(options.model)
    spec, budget = model.spec, Budget.parse(options.budget, model.spec)
    schedule, order = floors.heatkv(spec, budget, model.default_sinks)
    past = floors.past_tokens(spec, schedule)
    share = floors.share_of_full(spec, past)
    print(
        f"{spec.name}, HeatKV at {float(budget.fraction):g} of the full cache ({order}): attention does {share:.4f} of "
        f"the full cache's operations, at the last scale {floors.share_of_full(spec, past, slice(-1, None)):.4f}"
    )
    sequences = options.batch * spec.branches
    if options.floors:
        tera, giga = options.floors
        show_floors(spec, past, sequences, Ceilings(1e12 * tera, 1e9 * giga))
        return
    timer = Timer(options.device, 5 if options.quick else options.repeats)
    dtype = torch.bfloat16 if timer.gpu else torch.float32
    name = torch.cuda.get_device_name(options.device) if timer.gpu else f"{torch.get_num_threads()} threads"
    peak = measure_ceilings(timer, dtype)
    print(
        f"{name}, torch {torch.__version__}, {dtype}, batch {options.batch} of {spec.branches} sequences; "
        f"ceilings: {peak.flops / 1e12:.2f} TFLOP/s, {peak.bytes / 1e9:.1f} GB/s"
    )

    cases = [Case(spec, segment, sequences, dtype, timer) for segment in spec.segments]
    rows = HeatKVRows(spec, schedule, options.device)
    with torch.inference_mode():
        if options.paths:
            write_paths(options.paths, name, measure_paths(cases, rows, past))
            return
        if spec.family == "next-token":
            show_steps(cases[:: 4 if options.quick else 1], past, peak, options.groups)
        else:
            show_attention(cases, rows, past, peak, options.quick)
        show_mass(cases, past, peak)
        show_rebuilds(cases, rows, peak)
