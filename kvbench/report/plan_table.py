"""Tables of a plan: a method's schedule and memory, computed from shapes."""

from collections.abc import Mapping
from itertools import chain

from rich.console import Console

from kvbench.core.cards import Card
from kvbench.engine.memory import MIB, cache_bytes, paper_mib
from kvbench.engine.work import list_reads
from kvbench.plan import Floor, Plan
from kvbench.report.tables import print_line, print_rows


def show_plan(console: Console, plan: Plan) -> None:
    """Print the schedule, memory and largest batch of a plan."""
    spec, budget = plan.spec, plan.budget
    part = "scale" if spec.family == "next-scale" else "segment"
    names = [part, "size", "tokens", "cumulative", "held, at most", "KiB", "of B"]
    names += ["heads pruned N_k", "evicted early |E_k|"] if plan.segments[0].pruned is not None else []
    rows = []
    for row in plan.segments:
        at = row.segment
        used = row.held / budget.capacity if budget.bytes is None else row.held_bytes / budget.bytes
        share = f"{100 * float(used):.1f} %"
        kib = f"{row.held_bytes / 1024:.1f}"
        cells = [at.index, f"{at.height}x{at.width}", at.length, at.end, row.held, kib, share]
        rows.append(dict(zip(names, map(str, [*cells, row.pruned, row.early]), strict=False)))
    print_rows(console, f"{spec.name}: tokens one sequence holds", rows, 2)
    print_line(console, "")
    _show_memory(console, plan)
    dtype = str(plan.dtypes[1]).removeprefix("torch.")
    for line in (
        _describe_reads(plan),
        f"largest batch by estimate, in {dtype}: {plan.largest_batch['full']} full, {plan.largest_batch['method']} "
        f"with this method; calibration: {plan.calibration}",
    ):
        print_line(console, line, "")


def _describe_reads(plan: Plan) -> str:
    """Return a line on the bytes that attention reads from the cache."""
    each = plan.spec.branches / plan.samples
    reads = {
        name: each * list_reads(plan.spec, plan.steps, held).sum() for name, held in plan.contents.items()
    }
    full, read = reads["full"], reads.get("method")
    what = "a token of the longest text" if plan.spec.writes_text else "an image"
    line = f"MiB that attention reads from the cache for {what}: {full / MIB:.4g} full"
    if read is None:
        return f"{line}; this method selects what it reads, which a run measures"
    at_most = "" if plan.at_once else "at most "
    return f"{line}, {at_most}{read / MIB:.4g} with this method, {100 * read / full:.2f} %"


def show_floors(console: Console, plan: Plan, floors: Mapping[str, Mapping[str, Floor]], card: Card) -> None:
    """Print the minimum work and time of each phase of a batch on a GPU."""
    rates = f"{card.tera:g} TFLOP/s in 16 bits, {card.giga:g} GB/s: {card.source}"
    sums = [Floor(*map(sum, zip(*phases.values(), strict=True))) for phases in floors.values()]
    cells = {phase: [phases[phase] for phases in floors.values()] for phase in floors["full"]} | {"sum": sums}
    names = ["", *(f"{name}, {unit}" for name in floors for unit in ("TFLOP", "GB", "ms"))]
    rows = [
        dict(zip(names, (phase, *chain(*map(_write_floor, phase_floors))), strict=True))
        for phase, phase_floors in cells.items()
    ]
    print_line(console, "")
    print_rows(console, f"least time at batch {plan.batch} on {card.name} ({rates})", rows, 1)


def _write_floor(floor: Floor) -> tuple[str, str, str]:
    return f"{floor.operations / 1e12:.4g}", f"{floor.bytes / 1e9:.4g}", f"{1e3 * floor.seconds:.4g}"


def _show_memory(console: Console, plan: Plan) -> None:
    """Print the table of memory of a sequence and a batch: full cache, budget and the method's peak."""
    spec, budget, rows = plan.spec, plan.budget, []
    sequences = f"{spec.branches} sequence{'s' * (spec.branches > 1)} per prompt"
    title = f"memory at batch {plan.batch}, {sequences}; a token in one head: {plan.token_bytes} bytes"
    title += f", {str(plan.dtypes[0]).removeprefix('torch.')}" if plan.at_once else " at most"
    columns = ("tokens per sequence", "KiB per sequence", "% of 16 bits", "MiB, papers' convention")
    names = ("", *columns, "MiB, 16 bits", "MiB, cache + in flight", "% of full")
    each, whole = plan.token_bytes, plan.at_once.get("full")
    allowed = budget.capacity * each if budget.bytes is None else budget.bytes
    for name, tokens, size, at_once in (
        ("full cache", spec.full_tokens, spec.full_tokens * each, whole),
        (f"budget B, in {budget.unit}", float(budget.capacity), allowed, None),
        ("peak of the method", plan.peak_tokens, plan.peak_bytes, plan.at_once.get("method")),
    ):
        half = cache_bytes(tokens, spec, plan.batch, 2) / MIB
        shares = ["-", "-"]
        if plan.at_once or name != "full cache":  # the full cache in low-bit storage is measured by its run
            shares = [f"{float(size) / 1024:.1f}", f"{100 * float(size) / spec.full_bytes:.2f}"]
        mib = f"{paper_mib(tokens, spec, plan.batch):.1f}", f"{half:.1f}"
        needed = [f"{at_once / MIB:.1f}", f"{100 * at_once / whole:.1f}"] if at_once and whole else ["-", "-"]
        rows.append(dict(zip(names, (name, f"{tokens:.10g}", *shares, *mib, *needed), strict=True)))
    print_rows(console, title, rows, 1)
