"""A plan: the schedule of a method and the memory it needs, from shapes alone."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kvbench.engine.memory import MIB
from kvbench.plan import Plan


def show_plan(console: Console, plan: Plan, methods: Sequence[str]) -> None:
    """Print the schedule, memory columns and the largest batch of a plan, and the methods that fit the model."""
    spec = plan.spec
    table = Table(title=f"{spec.name}: tokens one sequence holds", title_justify="left")
    scheduled = plan.segments[0].pruned is not None
    names = ["scale", "size", "tokens", "cumulative", "held, at most", "of B"]
    for name in [*names, "heads pruned N_k", "evicted early |E_k|"] if scheduled else names:
        table.add_column(name, justify="right")
    for row in plan.segments:
        at = row.at
        share = f"{100 * row.held / float(plan.budget.capacity):.1f} %"
        cells = [at.index, f"{at.height}x{at.width}", at.length, at.end, row.held, share]
        table.add_row(*map(str, [*cells, row.pruned, row.early] if scheduled else cells))
    console.print(table)
    memory = Table(
        title=f"memory at batch {plan.batch}, {spec.branches} sequences per prompt", title_justify="left"
    )
    for name in ("", "tokens per sequence", "MiB, papers' convention", "MiB, 16-bit keys and values"):
        memory.add_column(name, justify="right" if name else "left")
    full, peak = plan.full_bytes / MIB, plan.peak_bytes / MIB
    memory.add_row("full cache", str(spec.full_tokens), f"{plan.full_mib:.1f}", f"{full:.1f}")
    capacity = plan.budget.capacity
    memory.add_row(
        "budget B",
        f"{float(capacity):g}",
        f"{plan.budget_mib:.1f}",
        f"{full * float(plan.budget.fraction):.1f}",
    )
    memory.add_row("peak of the method", str(plan.peak_tokens), f"{plan.peak_mib:.1f}", f"{peak:.1f}")
    console.print(memory)
    console.print(
        f"largest batch by estimate: {plan.largest_batch['full']} full, {plan.largest_batch['method']} with this "
        f"method; calibration: {plan.calibration}",
        highlight=False,
    )
    console.print(f"methods for {spec.name}, a {spec.family} model: {', '.join(methods)}", highlight=False)
