"""Kernels at a model's real shapes, scale by scale: ragged attention, attention mass and rebuilds under HeatKV.

Beside each: its floors by operations and by bytes at ceilings measured on this device first, and SDPA (flash on a GPU)
at equal work and on the full cache. Ends with attention over a whole generation against SDPA on the full cache. Of a
model that draws token by token, attention is that of one token in the middle of every segment, by the kernel of one
token and by that of several.

python -m benchmarks kernels --device cuda --model infinity_2b [--budget 0.1] [--batch 8] [--quick]
python -m benchmarks kernels --device cuda --model infinity_2b --paths kernels/attention_paths.json
python -m benchmarks kernels --device cuda --model llamagen_xl [--budget 0.167] [--groups 1]
python -m benchmarks kernels --model infinity_2b --floors 989 4800   (TFLOP/s, GB/s: no device, no times)
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path as File
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.support import floors
from benchmarks.support.arguments import Option
from benchmarks.support.build import build_model
from benchmarks.support.floors import Ceilings, Ints
from benchmarks.support.kernel_cases import Case, Held, Timer, ceilings
from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, Segment
from kvbench.kernels.attention_paths import PATHS, TABLE, WHY_NOT, Shape
from kvbench.kernels.layout import list_positions

GOAL = 0.6
"""Time of attention relative to SDPA on the full cache that we want at 10 %."""


class Attention(NamedTuple):
    """Seconds at one scale: floors by operations and bytes, SDPA on the full cache and at equal work, three raggeds."""

    operations: float
    bytes: float
    full: float
    dense: float
    heatkv: float
    equal: float
    spread: float


def attention(one: Case, held: Held, past: Ints, found: Ceilings, layers: range) -> tuple[Attention, float]:
    """Seconds of one scale, means over some layers, and operations of a layer; `past` int64 [L, H] is its rows'."""
    at, spec = one.at, one.spec
    works = [floors.attention(at.length, past[layer] + at.length, *one.sizes) for layer in layers]
    operations, moved = np.mean([found.floors(work) for work in works], 0).tolist()
    mean = float(past[list(layers)].mean())
    seconds = Attention(
        operations,
        moved,
        one.dense(at.end),
        one.dense(at.length + round(mean)),
        statistics.fmean(one.ragged(held.layout(layer, at)) for layer in layers),
        one.ragged(one.lengths(np.full(spec.heads, round(mean)))),
        one.ragged(one.lengths(floors.spread(mean, spec.heads))),
    )
    return seconds, statistics.fmean(work.flops for work in works)


def show_attention(cases: list[Case], held: Held, past: Ints, found: Ceilings, quick: bool) -> None:
    """Prints ragged attention scale by scale, then over a whole generation."""
    print(
        "\nragged attention of a layer, ms (heatkv: mean of layers; equal, 15-fold: rows of such lengths, same mean)"
    )
    heading(
        "past longest",
        "operations bytes sdpa-full sdpa-equal heatkv equal 15-fold TFLOP/s x-floor x-equal x-full",
    )
    spec = cases[0].spec
    layers = range(0, spec.layers, max(1, spec.layers // 4) if quick else 1)
    whole = []
    for one in cases:
        rows = past[one.at.index]
        t, operations = attention(one, held, rows, found, layers)
        ratios = (operations / t.heatkv / 1e12, t.heatkv / max(t[:2]), t.heatkv / t.dense, t.heatkv / t.full)
        line(one.at, (round(float(rows.mean())), int(rows.max())), [1e3 * seconds for seconds in t], ratios)
        whole.append((t.full, t.heatkv, max(t[:2])))
    full, mine, floor = (spec.layers * sum(column) for column in zip(*whole, strict=True))
    print(
        f"attention of a whole generation: {1e3 * full:.2f} ms by SDPA on the full cache, {1e3 * mine:.2f} ms with "
        f"HeatKV, {mine / full:.3f} of it (goal at 10 %: {GOAL}); floor {1e3 * floor:.2f} ms, {floor / full:.3f}"
    )


def measure_paths(cases: list[Case], held: Held, past: Ints) -> list[dict[str, object]]:
    """Print all paths of attention scale by scale, under HeatKV and with equal rows; return what each shape took.

    A path that cannot serve a shape is left out; why it cannot is printed once.
    """
    print("\nattention of the middle layer by every path, ms")
    heading("past uniform", " ".join(PATHS))
    lines, reasons = [], set()
    for one in cases:
        spec, rows = one.spec, past[one.at.index]
        equal = one.lengths(np.full(spec.heads, round(float(rows.mean()))))
        for layout in (held.layout(spec.layers // 2, one.at), equal):
            shape = Shape(
                spec.head_dim, str(one.dtype).removeprefix("torch."), one.sequences * spec.heads, one.at.length,
                one.at.length, layout.total // spec.heads, layout.uniform,
            )  # fmt: skip
            refused = {path: WHY_NOT[path](shape, torch.device(one.timer.device)) for path in PATHS}
            reasons |= {f"{path}: {reason}" for path, reason in refused.items() if reason}
            times = {path: 1e3 * one.ragged(layout, path) for path in PATHS if refused[path] is None}
            line(one.at, (shape.past, shape.uniform), [times.get(path, math.nan) for path in PATHS], ())
            lines.append(
                shape._asdict() | {"milliseconds": {path: float(f"{ms:.4g}") for path, ms in times.items()}}
            )
    print("\n".join(["not measured:", *sorted(reasons)]))
    return lines


def write_paths(file: File, device: str, lines: list[dict[str, object]]) -> None:
    """Put the paths' times into a table, in place of what it says of the same shapes on that device."""
    table = json.loads(file.read_text()) if file.is_file() else {}
    shapes = [{**one, "milliseconds": None} for one in lines]
    others = [one for one in table.get(device, []) if {**one, "milliseconds": None} not in shapes]
    table[device] = others + lines
    file.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def show_steps(cases: list[Case], past: Ints, found: Ceilings, groups: int) -> None:
    """Prints attention of one token amid every segment but the prompt, rows being as long as HeatKV's mean."""
    print(
        "\nattention of one token in a layer, ms (whole: no token pruned; 15-fold: rows of such lengths, same mean)"
    )
    heading("past mean", "bytes sdpa-whole whole bytes equal 15-fold several x-floor several/one x-whole")
    for one in cases[1:]:
        at, spec = one.at, one.spec
        mean, room = round(float(past[at.index].mean())), at.length
        whole, equal = (np.full(spec.heads, length) for length in (at.start, mean))
        works = (floors.step(rows + room // 2 + 1, groups, *one.sizes) for rows in (whole, equal))
        floor = [max(found.floors(work)) for work in works]
        layout = one.lengths(equal, room)
        full, mine = (one.step(one.lengths(rows, room), groups) for rows in (whole, equal))
        ragged = one.step(one.lengths(floors.spread(mean, spec.heads), room), groups)
        several = one.step(layout, groups, alone=False)
        sdpa = one.dense(at.start + room // 2 + 1, groups)
        times = [1e3 * t for t in (floor[0], sdpa, full, floor[1], mine, ragged, several)]
        line(at, (at.start, mean), times, (mine / floor[1], several / mine, mine / full))


def show_mass(cases: list[Case], past: Ints, found: Ceilings) -> None:
    """Prints attention mass scale by scale, the last left out: nothing is pruned there."""
    print("\nattention mass of a layer, ms (rows of equal length)")
    heading("past", "operations bytes mass sdpa-equal x-floor x-equal")
    for one in cases[:-1]:
        at, spec = one.at, one.spec
        mean = round(float(past[at.index].mean()))
        rows = np.full(spec.heads, mean)
        floor = found.floors(floors.mass(at.length, rows + at.length, *one.sizes))
        mine, equal = one.mass(one.lengths(rows)), one.dense(mean + at.length)
        line(at, (mean,), [1e3 * t for t in (*floor, mine, equal)], (mine / max(floor), mine / equal))


def show_rebuilds(cases: list[Case], held: Held, found: Ceilings) -> None:
    """Prints rebuilds scale by scale, the last left out: nothing is stored there."""
    print("\nkeys and values of the middle layer rebuilt under HeatKV, ms")
    heading("slots", "bytes rebuild x-floor")
    for one in cases[:-1]:
        at, spec = one.at, one.spec
        layer = spec.layers // 2
        before = held.layout(layer, at)
        slots = list_positions(before, at.start, at.length)
        mine, kept = one.rebuild(before, held.kept(layer, at.index + 1, slots))
        floor = max(found.floors(floors.rebuild(kept, *one.sizes)))
        line(at, (kept,), [1e3 * floor, 1e3 * mine], (mine / floor,))


def show_floors(spec: ModelSpec, past: Ints, sequences: int, given: Ceilings) -> None:
    """Prints what a generation in 16 bits must take at given rates."""
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
    print(f"{sequences} sequences, bf16, at {given.flops / 1e12:g} TFLOP/s and {given.bytes / 1e9:g} GB/s")
    print(f"{'ms per generation':24s}{'operations':>12s}{'bytes':>12s}")
    for name, parts in works.items():
        times = np.sum([given.floors(part) for part in parts], 0)
        print(f"{name:24s}" + "".join(f"{1e3 * seconds:12.3f}" for seconds in times))


def heading(counts: str, columns: str) -> None:
    """Prints names of columns."""
    print(f"{'scale':>12s}" + "".join(f"{name:>9s}" for name in counts.split()), end="")
    print("".join(f"{name:>12s}" for name in columns.split()))


def line(at: Segment, counts: Sequence[int], milliseconds: Sequence[float], ratios: Sequence[float]) -> None:
    """Prints one scale."""
    size = f"{at.index}: {at.height}x{at.width}"
    print(f"{size:>12s}" + "".join(f"{count:9d}" for count in counts), end="")
    print(
        "".join(f"{value:12.4f}" for value in milliseconds) + "".join(f"{value:12.2f}" for value in ratios),
        flush=True,
    )


OPTIONS = {
    "device": "auto", "model": "infinity_tiny", "budget": "0.1", "batch": 8, "repeats": 20, "threads": None,
    "groups": Option(1, "query heads per row, of one-token steps"),
    "paths": Option(None, f"only measure all paths; write this table ({TABLE.name})", type=File),
    "quick": Option(False, "a quarter of the layers, five repeats"),
    "floors": Option(
        None, "count at these rates, time nothing", nargs=2, type=float, metavar=("TFLOP/s", "GB/s")
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
    found = ceilings(timer, dtype)
    print(
        f"{name}, torch {torch.__version__}, {dtype}, batch {options.batch} of {spec.branches} sequences; "
        f"ceilings: {found.flops / 1e12:.2f} TFLOP/s, {found.bytes / 1e9:.1f} GB/s"
    )

    cases = [Case(spec, at, sequences, dtype, timer) for at in spec.segments]
    held = Held(spec, schedule, options.device)
    with torch.inference_mode():
        if options.paths:
            write_paths(options.paths, name, measure_paths(cases, held, past))
            return
        if spec.family == "next-token":
            show_steps(cases[:: 4 if options.quick else 1], past, found, options.groups)
        else:
            show_attention(cases, held, past, found, options.quick)
        show_mass(cases, past, found)
        show_rebuilds(cases, held, found)
