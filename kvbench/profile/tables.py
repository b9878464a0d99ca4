"""Tables of `task=profile`: latency and memory by batch size, phases, operators."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvbench.engine.memory import MIB
from kvbench.profile.paths import format_segments
from kvbench.profile.task import announce, profile
from kvbench.runs.job import Job

ProfileContents = Mapping[str, Any]
"""Contents of a file of `task=profile` (`kvbench.profile.task`)."""
PHASES = ("text", "recorded", "transformer", "cache", "decode", "rest")
Columns = Mapping[str, tuple[str, float, str]]
"""Path of a value in a row, its factor, and its format, by heading."""
LATENCY: Columns = {
    "ms/batch": ("latency.median", 1e3, ".1f"),
    "p10": ("latency.p10", 1e3, ".1f"),
    "p90": ("latency.p90", 1e3, ".1f"),
    "ms/image": ("seconds_per_image", 1e3, ".2f"),
    "images/s": ("images_per_second", 1, ".2f"),
    "tokens/s": ("tokens_per_second", 1, ".0f"),
    "x full": ("ratio_to_full", 1, ".3f"),
    "first, ms": ("first_seconds", 1e3, ".0f"),
}
MEMORY_TITLE = (
    "memory, MiB: the cache's ledger; the GPU allocator's peak, what it reserved, and its level before"
)
MEMORY: Columns = {
    "KV held": ("kv.peak_bytes", 1 / MIB, ".2f"),
    "of full": ("kv.peak_of_full", 1, ".4f"),
    "of B": ("kv.peak_of_budget", 1, ".4f"),
    "rebuild": ("kv.rebuild_bytes", 1 / MIB, ".2f"),
    "in flight": ("kv.transient_bytes", 1 / MIB, ".2f"),
    "read": ("kv.read_bytes", 1 / MIB, ".2f"),
    "state": ("kv.state_bytes", 1 / MIB, ".2f"),
    "allocator": ("allocator.peak_bytes", 1 / MIB, ".2f"),
    "reserved": ("allocator.reserved_bytes", 1 / MIB, ".2f"),
    "before": ("allocator.before_bytes", 1 / MIB, ".2f"),
}


def profile_and_show(console: Console, job: Job) -> Path:
    """Measure, print the tables and the file's path, and return the path."""
    console.print(announce(job), highlight=False, soft_wrap=True)
    path, contents = profile(job)
    show_profile(console, contents)
    console.print(f"written: {path}", highlight=False, soft_wrap=True)
    return path


def show_profile(console: Console, contents: ProfileContents) -> None:
    """Print the contents of a profile as tables."""
    machine = contents["provenance"]
    device = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
    random = " (random weights)" if contents["weights"] == "random" else ""
    counted = " in bytes" if contents["budget"].get("unit") == "bytes" else ""
    share = (
        ""
        if contents["method"] == "full"
        else f" at {contents['budget']['fraction']:g} of the full cache{counted}"
    )
    title = f"{contents['model']}{random}, {contents['method']}{share}   {device}, torch {machine['versions']['torch']}"
    measured = [row for row in contents["rows"] if row["status"] == "ok"]
    console.print(tabulate_values(title, LATENCY, contents["rows"], ""))
    console.print(tabulate_values(MEMORY_TITLE, MEMORY, measured, "-"))
    console.print(tabulate_phases(contents["rows"]))
    console.print(tabulate_paths(contents["rows"]))
    lines = []
    if contents["calibration"] is not None:
        lines.append(f"calibration: {contents['calibration']}")
    if any(row["status"] == "ok" and row["allocator"] is None for row in contents["rows"]):
        lines.append("allocator peak: not measured on a CPU")
    if contents["largest"] is not None:
        fits = ", ".join(f"{batch} {name}" for name, batch in contents["largest"].items())
        lines.append(f"largest batch that fits: {fits}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if contents["operators"] is not None:
        console.print(tabulate_operators(contents["operators"]))


def tabulate_values(title: str, columns: Columns, rows: Sequence[ProfileContents], absent: str) -> Table:
    """Return a table with the values, or the status, of each batch size and cache; `absent` stands for None."""
    table = _make_table(title, ("batch", "cache", *columns))
    for row in rows:
        cells = [row["status"]]
        if row["status"] == "ok":
            cells = [_format_cell(row, *column) or absent for column in columns.values()]
        table.add_row(str(row["batch"]), escape(row["cache"]), *cells)
    return table


def tabulate_phases(rows: Sequence[ProfileContents]) -> Table:
    """Return the table of phases: milliseconds and shares per batch size and cache, and the cost of watching.

    If latencies use CUDA graphs, rows of graphs precede rows of launches.
    """
    ok = [row for row in rows if row["status"] == "ok"]
    recorded = any(row["phases_by_launches"] for row in ok)
    phases = [name for name in PHASES if recorded or name != "recorded"]
    names = ("batch", "cache", "run by", *phases, "total", "of the latency")
    table = _make_table("phases of one generation, ms (rest: sampling, codes, pixels)", names)
    for row in ok:
        launched = row["phases_by_launches"]
        for way, measured in (("graphs" if launched else "launches", row["phases"]), ("launches", launched)):
            if measured is None:
                continue
            seconds, total = measured["seconds"], measured["total"]
            parts = [
                f"{1e3 * seconds.get(name, 0):.1f} ({seconds.get(name, 0) / total:.0%})" for name in phases
            ]
            watched = f"{total / row['latency']['median']:.2f}"
            cells = (str(row["batch"]), escape(row["cache"]), way, *parts, f"{1e3 * total:.1f}", watched)
            table.add_row(*cells)
    return table


def tabulate_paths(rows: Sequence[ProfileContents]) -> Table:
    """Return the table of attention paths of each cache at its largest batch, with reasons against the others."""
    table = Table(title="attention by segment", title_justify="left", box=SIMPLE_HEAD)
    for name in ("batch", "cache", "segments", "calls", "path", "why no other"):
        table.add_column(name, overflow="fold")
    largest = {row["cache"]: row for row in rows if row["status"] == "ok"}  # rows have ascending batches
    for row in largest.values():
        for entry in row["attention"]:
            reasons = "\n".join(f"{other}: {reason}" for other, reason in entry["others"].items())
            cells = (str(row["batch"]), row["cache"], format_segments(entry["segments"]), str(entry["calls"]))
            table.add_row(*map(escape, (*cells, entry["path"], reasons)))
    return table


def tabulate_operators(contents: Sequence[ProfileContents]) -> Table:
    """Return the table of torch's operators by their own time."""
    table = _make_table("operators by their own time, one batch", ("operator", "calls", "ms"))
    for operator in contents:
        table.add_row(
            escape(operator["name"]), str(operator["calls"]), f"{1e3 * operator['self_seconds']:.2f}"
        )
    return table


def _make_table(title: str, names: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in names:
        table.add_column(name, justify="left" if name in ("cache", "operator") else "right")
    return table


def _format_cell(row: ProfileContents, path: str, factor: float, form: str) -> str:
    """Return a value of a row as a string, empty if it was not measured."""
    value: Any = row
    for key in path.split("."):
        value = None if value is None else value[key]
    return "" if value is None else format(factor * value, form)
