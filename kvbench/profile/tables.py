"""Tables of `task=profile`: latency and memory by batch size, phases, operators."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvbench.engine.memory import MIB
from kvbench.profile.task import announce, profile
from kvbench.runs.job import Job

Found = Mapping[str, Any]
"""Contents of a profile's file (`kvbench.profile.task`)."""
PHASES = ("text", "transformer", "cache", "decode", "rest")


def profile_and_show(console: Console, job: Job) -> None:
    """Say what is about to be measured, measure it, print the tables and where they were written."""
    console.print(announce(job), highlight=False, soft_wrap=True)
    path, found = profile(job)
    show_profile(console, found)
    console.print(f"written: {path}", highlight=False, soft_wrap=True)


def show_profile(console: Console, found: Found) -> None:
    """Print everything that a profile found."""
    made = found["provenance"]
    device = made["gpu"] or f"{made['cpu']}, {made['threads']} threads"
    random = " (random weights)" if found["weights"] == "random" else ""
    counted = " in bytes" if found["budget"].get("unit") == "bytes" else ""
    share = (
        "" if found["method"] == "full" else f" at {found['budget']['fraction']:g} of the full cache{counted}"
    )
    title = (
        f"{found['model']}{random}, {found['method']}{share}   {device}, torch {made['versions']['torch']}"
    )
    console.print(tabulate_latencies(title, found["rows"]))
    console.print(tabulate_memory(found["rows"]))
    console.print(tabulate_phases(found["rows"]))
    lines = []
    if found["calibration"] is not None:
        lines.append(f"calibration: {found['calibration']}")
    if any(row["status"] == "ok" and row["allocator"] is None for row in found["rows"]):
        lines.append("allocator peak: not measured on a CPU")
    if found["largest"] is not None:
        fits = ", ".join(f"{batch} {name}" for name, batch in found["largest"].items())
        lines.append(f"largest batch that fits: {fits}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if found["operators"] is not None:
        console.print(tabulate_operators(found["operators"]))


def tabulate_latencies(title: str, rows: Sequence[Found]) -> Table:
    """Return the table of latencies, a line per batch size and cache."""
    names = (
        "batch",
        "cache",
        "ms/batch",
        "p10",
        "p90",
        "ms/image",
        "images/s",
        "tokens/s",
        "x full",
        "first, ms",
    )
    table = _make_table(title, names)
    for row in rows:
        if row["status"] != "ok":
            table.add_row(str(row["batch"]), escape(row["cache"]), row["status"], *[""] * 7)
            continue
        latency, ratio = row["latency"], row["ratio_to_full"]
        table.add_row(
            str(row["batch"]),
            escape(row["cache"]),
            *(f"{1e3 * latency[name]:.1f}" for name in ("median", "p10", "p90")),
            f"{1e3 * row['seconds_per_image']:.2f}",
            f"{row['images_per_second']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            "" if ratio is None else f"{ratio:.3f}",
            f"{1e3 * row['first_seconds']:.0f}",
        )
    return table


def tabulate_memory(rows: Sequence[Found]) -> Table:
    """Return the table of memory in MiB, a line per batch size and cache."""
    names = (
        "batch",
        "cache",
        "KV held",
        "of full",
        "of B",
        "rebuild",
        "in flight",
        "state",
        "allocator",
        "reserved",
        "before",
    )
    table = _make_table(
        "memory, MiB: the cache's ledger; the GPU allocator's peak, what it reserved, and its level before",
        names,
    )
    for row in rows:
        if row["status"] != "ok":
            continue
        kv, allocator = row["kv"], row["allocator"]
        table.add_row(
            str(row["batch"]),
            escape(row["cache"]),
            _format_mib(kv["peak_bytes"]),
            f"{kv['peak_of_full']:.4f}",
            f"{kv['peak_of_budget']:.4f}",
            *(_format_mib(kv[f"{name}_bytes"]) for name in ("rebuild", "transient", "state")),
            *(
                "-" if allocator is None else _format_mib(allocator[f"{name}_bytes"])
                for name in ("peak", "reserved", "before")
            ),
        )
    return table


def tabulate_phases(rows: Sequence[Found]) -> Table:
    """Return the table of phases, a line per batch size and cache: milliseconds, shares, and what watching cost."""
    names = ("batch", "cache", *PHASES, "total", "of the latency")
    table = _make_table("phases of one generation, ms (rest: sampling, codes, pixels)", names)
    for row in rows:
        if row["status"] != "ok":
            continue
        seconds, total = row["phases"]["seconds"], row["phases"]["total"]
        parts = [f"{1e3 * seconds.get(name, 0):.1f} ({seconds.get(name, 0) / total:.0%})" for name in PHASES]
        watched = f"{total / row['latency']['median']:.2f}"
        table.add_row(str(row["batch"]), escape(row["cache"]), *parts, f"{1e3 * total:.1f}", watched)
    return table


def tabulate_operators(found: Sequence[Found]) -> Table:
    """Return the table of operators, a line for each."""
    table = _make_table("operators by their own time, one batch", ("operator", "calls", "ms"))
    for one in found:
        table.add_row(escape(one["name"]), str(one["calls"]), f"{1e3 * one['self_seconds']:.2f}")
    return table


def _make_table(title: str, names: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in names:
        table.add_column(name, justify="left" if name in ("cache", "operator") else "right")
    return table


def _format_mib(count: float) -> str:
    return f"{count / MIB:.2f}"
