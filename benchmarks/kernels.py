"""Attention at a model's real shapes, scale by scale: every path that can serve a shape, beside SDPA.

Rows of the middle layer are those that HeatKV keeps, then rows of equal length, the mean of all layers. `floor` is the
larger lower bound of these rows by operations and by bytes, at peak rates measured on this device first; `sdpa-full`
is SDPA (flash on a GPU) on the full cache. The last line sums the fastest paths over all layers of a generation.

python -m benchmarks kernels --device cuda --model infinity_2b [--budget 0.1] [--batch 8] [--repeats 5]
python -m benchmarks kernels --device cuda --model infinity_2b --paths kernels/attention_paths.json
"""

import argparse
import json
from pathlib import Path as File

import numpy as np
import torch

from benchmarks.support import floors
from benchmarks.support.arguments import Option
from benchmarks.support.build import build_model
from benchmarks.support.floors import Ceilings, Ints
from benchmarks.support.kernel_cases import Case, Timer, measure_ceilings
from benchmarks.support.plane_cases import arrange_lengths
from benchmarks.support.table import Table
from kvbench.core.budget import Budget
from kvbench.kernels.attention_paths import PATHS, TABLE, Shape, find_obstacle
from kvbench.kernels.layout import Layout

GOAL = 0.6
"""Target at 10 %: time of attention relative to SDPA on the full cache."""


def list_layouts(past: Ints, device: str) -> tuple[Layout, Layout]:
    """Return layouts of the middle layer's rows, and of equal rows with the mean of all layers.

    `past`, int64 [L, H], has the cached tokens when a scale starts.
    """
    middle = past[len(past) // 2]
    ragged, even = (arrange_lengths(rows, device) for rows in (middle, [round(past.mean())] * len(middle)))
    return ragged, even


def measure_paths(cases: list[Case], past: Ints, peak: Ceilings) -> list[dict[str, object]]:
    """Print all attention paths scale by scale, and the sum over a generation; return the milliseconds.

    `past`, int64 [K, L, H], has the cached tokens when each scale starts. Paths that cannot serve a shape are left out;
    each reason is printed once.
    """
    print("\nattention of the middle layer by every path, ms")
    counts, times = ("past", "uniform"), ("floor", "sdpa-full", *PATHS)
    table = Table(dict.fromkeys(counts, "d") | dict.fromkeys(times, ".4f"), "scale", 12)
    lines, reasons, totals = [], set(), np.zeros(3)
    for case in cases:
        spec, segment = case.spec, case.segment
        dense = 1e3 * case.dense(segment.end)
        for layout in list_layouts(past[segment.index], case.timer.device):
            shape = Shape(
                spec.head_dim, str(case.dtype).removeprefix("torch."), case.sequences * spec.heads,
                segment.length, segment.length, layout.total // spec.heads, layout.uniform,
            )  # fmt: skip
            problems = {path: find_obstacle(path, shape, torch.device(case.timer.device)) for path in PATHS}
            reasons |= {f"{path}: {reason}" for path, reason in problems.items() if reason}
            found = {path: 1e3 * case.ragged(layout, path) for path in PATHS if problems[path] is None}
            seen = np.array(layout.counts) + segment.length
            floor = 1e3 * peak.floor(floors.attention(segment.length, seen, *case.sizes))
            name = f"{segment.index}: {segment.height}x{segment.width}"
            table.add(name, shape.past, shape.uniform, floor, dense, *map(found.get, PATHS))
            milliseconds = {path: float(f"{ms:.4g}") for path, ms in found.items()}
            lines.append(shape._asdict() | {"milliseconds": milliseconds})
            if len(lines) % 2:  # HeatKV's rows
                totals += spec.layers * np.array([dense, min(found.values()), floor])
    print("\n".join(["not measured:", *sorted(reasons)]))
    full, mine, least = totals
    print(
        f"attention of a whole generation: {full:.2f} ms by SDPA on the full cache, {mine:.2f} ms with HeatKV, "
        f"{mine / full:.3f} of it (goal at 10 %: {GOAL}); floor {least:.2f} ms, {least / full:.3f}"
    )
    return lines


def write_paths(file: File, device: str, lines: list[dict[str, object]]) -> None:
    """Write the times of paths into a table; they replace times of the same shapes on that device."""
    table = json.loads(file.read_text()) if file.is_file() else {}
    shapes = [{**line, "milliseconds": None} for line in lines]
    others = [line for line in table.get(device, []) if {**line, "milliseconds": None} not in shapes]
    table[device] = others + lines
    file.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


OPTIONS = {
    "device": "auto", "model": "infinity_tiny", "budget": "0.1", "batch": 8, "repeats": 20, "threads": None,
    "paths": Option(None, f"write the times into this table ({TABLE.name})", type=File),
}  # fmt: skip


def main(options: argparse.Namespace) -> None:
    """Print the times of a next-scale model.

    Raises:
        ValueError: the model is not a next-scale model.
    """
    model = build_model(options.model)
    spec, budget = model.spec, Budget.parse(options.budget, model.spec)
    if spec.family != "next-scale":
        raise ValueError(f"--model {options.model}: has no scales; choose a next-scale model")
    schedule, order = floors.heatkv(spec, budget, model.default_sinks)
    past = floors.past_tokens(spec, schedule)
    share = floors.share_of_full(spec, past)
    print(
        f"{spec.name}, HeatKV at {float(budget.fraction):g} of the full cache ({order}): attention does {share:.4f} of "
        f"the full cache's operations, at the last scale {floors.share_of_full(spec, past, slice(-1, None)):.4f}"
    )
    sequences = options.batch * spec.branches
    timer = Timer(options.device, options.repeats)
    dtype = torch.bfloat16 if timer.gpu else torch.float32
    name = torch.cuda.get_device_name(options.device) if timer.gpu else f"{torch.get_num_threads()} threads"
    peak = measure_ceilings(timer, dtype)
    print(
        f"{name}, torch {torch.__version__}, {dtype}, batch {options.batch} of {spec.branches} sequences; "
        f"ceilings: {peak.flops / 1e12:.2f} TFLOP/s, {peak.bytes / 1e9:.1f} GB/s"
    )
    cases = [Case(spec, segment, sequences, dtype, timer) for segment in spec.segments]
    with torch.inference_mode():
        lines = measure_paths(cases, past, peak)
    if options.paths:
        write_paths(options.paths, name, lines)
