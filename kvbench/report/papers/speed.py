"""Table of the times and memory of `task=profile`, beside published values."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from kvbench.report.papers.comparison import format_cost
from kvbench.report.papers.published import PublishedTable, Settings, find, model_of
from kvbench.report.tables import Row, publish
from kvbench.report.timings import Timing, name_device, read_timings

UNMEASURED = "n/a"
LEGEND = (
    "latency and s/batch: generation and decoding; x full: generation in units of the full cache's at the same batch; "
    "largest batch: by profile.largest=true on a GPU; GB: 10^9 bytes"
)
ON_CPU = f"{UNMEASURED}: a CPU has no allocator that counts memory; device=cuda measures it"


Value = Callable[[Timing, Timing | None], float | None]
"""Value of a timing, given the full cache's timing at the same batch, or None if it was not timed."""
MEASURES: Mapping[str, Value] = {
    "memory GB": lambda timing, _: timing.reserved_gb,
    "saving %": lambda timing, full: _save(timing, full),
    "cache MiB": lambda timing, _: timing.paper_mib,
    "cache 1000 MiB": lambda timing, _: None if timing.paper_mib is None else timing.paper_mib / 1000,
    "latency s": lambda timing, _: timing.row["latency"]["median"],
    "images/s": lambda timing, _: timing.row["images_per_second"],
    "tokens/s": lambda timing, _: timing.row["tokens_per_second"],
    "x full": lambda timing, full: None if full is None else timing.generation / full.generation,
}
"""Published columns that a timing has; `x full` is the time of a generation without decoding."""
PARTS: Mapping[str, Value] = {
    "s/batch": MEASURES["latency s"],
    "generation s": lambda timing, _: timing.generation,
    "decoding s": lambda timing, _: timing.decoding,
    "x full": MEASURES["x full"],
    "KV GB": lambda timing, _: timing.row["kv"]["peak_bytes"] / 1e9,
    "reserved GB": lambda timing, _: timing.reserved_gb,
}
"""Columns of every table after the published ones."""
PART_OF = {"latency s": "s/batch", "memory GB": "reserved GB"}
"""Column of `PARTS` with the same value, by published column."""
GPU_COLUMNS = ("memory GB", "saving %", "reserved GB")
"""Columns that need a GPU."""


def make_rows(table: PublishedTable | None, timings: Sequence[Timing]) -> list[Row]:
    """Return a row for each timing: settings, measured and published cells by metric, then the parts of its time.

    Timings that match rows of the table come first, in the table's order.
    """
    labels = () if table is None else table.labels(sorted({timing.model for timing in timings}))
    return [_make_row(table, labels, where, timing, timings) for where, timing in _match(table, timings)]


def show_speed(
    console: Console, published: str | Sequence[str] | None, paths: Sequence[Path], folder: Path
) -> None:
    """Print the times and memory in some files of `task=profile`, beside one table's published values.

    It writes report-speed-<table>.md into a folder, or report-speed.md if `published` is not the name of one table.

    Raises:
        ConfigError: there is no such table, or a file cannot be read.
    """
    table, timings = find(published) if isinstance(published, str) else None, read_timings(paths)
    rows = make_rows(table, timings)
    lead = len(_list_settings(table, timings[0], timings))
    note = LEGEND + (f". {ON_CPU}" if any(UNMEASURED in row.values() for row in rows) else "")
    path = folder / f"report-speed{'' if table is None else f'-{table.name}'}.md"
    publish(console, _make_title(table, timings), rows, lead, path, note)


def _match(table: PublishedTable | None, timings: Sequence[Timing]) -> list[tuple[Settings, Timing]]:
    """Return timings with the settings of their rows, in the table's order; timings without a row come last."""
    if table is None:
        return [({}, timing) for timing in timings]
    others = [timing for timing in timings if not table.find_rows(timing)]
    return [
        *table.match(timings),
        *(({}, timing) for timing in sorted(others, key=lambda timing: timing.row["batch"])),
    ]


def _find_full(timing: Timing, timings: Sequence[Timing]) -> Timing | None:
    """Return the full cache's timing at equal model and batch, preferably of the same file, then with equal graphs."""
    graph, wanted = timing.find_setting("cuda_graph"), ("full", timing.model, timing.row["batch"])
    fulls = [
        other
        for other in timings
        if other.is_ok and (other.method, other.model, other.row["batch"]) == wanted
    ]
    return max(
        fulls,
        key=lambda other: (other.profile is timing.profile, other.find_setting("cuda_graph") == graph),
        default=None,
    )


def _save(timing: Timing, full: Timing | None) -> float | None:
    if full is None or timing.reserved_gb is None or full.reserved_gb is None:
        return None
    return 100 * (1 - timing.reserved_gb / full.reserved_gb)


def _make_title(table: PublishedTable | None, timings: Sequence[Timing]) -> str:
    models = sorted({timing.model for timing in timings})
    random = " (random weights)" if any(timing.profile["weights"] == "random" for timing in timings) else ""
    torch = timings[0].profile["provenance"]["versions"]["torch"]
    measured = f"{', '.join(models)}{random}, {name_device(timings[0].profile)}, torch {torch}"
    if table is None:
        return f"times and memory of {measured}"
    labels = table.labels(models)
    published = " / ".join(labels if len(labels) < 3 else dict.fromkeys(map(model_of, labels)))
    return f"{table.source}: {table.title}. Published: {published}, {table.data}; measured: {measured}"


def _list_settings(table: PublishedTable | None, timing: Timing, timings: Sequence[Timing]) -> dict[str, str]:
    row = {"model": timing.model} if len({other.model for other in timings}) > 1 else {}
    keys = ["method", "budget", *(() if table is None else (*table.fixed, *table.keys)), "latency.batch"]
    for key in dict.fromkeys(keys):
        value = timing.find_setting(key)
        text = f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value).lower()
        row[key.removeprefix("latency.").removeprefix("method.")] = text
    return row


def _make_row(
    table: PublishedTable | None,
    labels: Sequence[str],
    where: Settings,
    timing: Timing,
    timings: Sequence[Timing],
) -> Row:
    full = _find_full(timing, timings)
    cells = _list_settings(table, timing, timings)
    names = " / ".join(labels) if len(labels) < 3 else "published"
    for metric in () if table is None else table.metrics:
        if metric in MEASURES:
            cells[metric] = _format(metric, MEASURES[metric], timing, full)
            assert table is not None
            printed = [table.cell(label, where, metric) if where else None for label in labels]
            cells[f"{metric}, {names}"] = " / ".join(text or "-" for text in printed) if any(printed) else "-"
    same = [PART_OF.get(name, name) for name in cells]
    cells |= {name: _format(name, value, timing, full) for name, value in PARTS.items() if name not in same}
    largest = (timing.profile["largest"] or {}).get(timing.row["cache"])
    return {**cells, "largest batch": "-" if largest is None else str(largest)}


def _format(name: str, value: Value, timing: Timing, full: Timing | None) -> str:
    """Return a cell: a value, the status of a batch that was not timed, or `UNMEASURED`."""
    if not timing.is_ok:
        return "OOM" if timing.row["status"] == "out of memory" else str(timing.row["status"])
    if name in GPU_COLUMNS and timing.reserved_gb is None:
        return UNMEASURED
    return format_cost(value(timing, full))
