"""Times and memory of `task=profile`, and a table that shows them beside published values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench.core.config import ConfigError
from kvbench.core.files import parse_json, read_text
from kvbench.engine.memory import MIB, PAPER_BYTES
from kvbench.report.papers.comparison import format_cost
from kvbench.report.papers.published import PublishedTable, Settings, find, model_of
from kvbench.report.tables import Row, publish

UNMEASURED = "n/a"
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a stored value, by the dtype of the cache."""
LEGEND = (
    "latency and s/batch: generation and decoding; x full: generation in units of the full cache's at the same batch; "
    "largest batch: by profile.largest=true on a GPU; GB: 10^9 bytes"
)
ON_CPU = f"{UNMEASURED}: a CPU has no allocator that counts memory; device=cuda measures it"


@dataclass(frozen=True)
class Timing:
    """One cache at one batch size, from a file of `task=profile` (`kvbench.profile.task` lists its contents).

    Attributes:
        profile: contents of the file.
        row: entry of its `rows` for the cache and batch size.
    """

    profile: Mapping[str, Any]
    row: Mapping[str, Any]

    @property
    def model(self) -> str:
        """Name of the model, `model.name`."""
        return str(self.profile["model"])

    @property
    def model_label(self) -> str:
        """Name of the model; random weights take the same time."""
        return self.model

    @property
    def method(self) -> str:
        """Name of the method; `full` for the full cache that was timed alternately with a method."""
        return "full" if self._is_reference else str(self.profile["method"])

    @property
    def is_ok(self) -> bool:
        """Whether the batch fitted in memory and was timed."""
        return bool(self.row["status"] == "ok")

    @property
    def _is_reference(self) -> bool:
        return self.row["cache"] == "full" != self.profile["method"]

    def find_setting(self, key: str) -> object:
        """Return a setting that identifies rows, see `kvbench.report.papers.published.find_setting`."""
        budget = self.profile["budget"]
        if key == "method":
            return self.method
        if key == "budget":
            share = 1.0 if self._is_reference else budget["fraction"]
            return share if budget["unit"] == "tokens" else f"{share:.4g} bytes"
        if key == "latency.batch":
            return self.row["batch"]
        if key == "cuda_graph":
            return self.profile["provenance"]["cuda_graph"] == "on"
        node: Any = {} if key.startswith("method.") and self._is_reference else self.profile["config"]
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node

    @property
    def decoding(self) -> float | None:
        """Seconds in which a batch's tokens become pixels or texts; None if the model times no such call."""
        seconds = self.row["phases"]["seconds"].get("decode")
        return None if seconds is None else float(seconds)

    @property
    def generation(self) -> float:
        """Seconds of a batch without decoding to pixels or text."""
        return float(self.row["latency"]["median"]) - (self.decoding or 0.0)

    @property
    def reserved_gb(self) -> float | None:
        """GB that the allocator reserved at the peak; None on a CPU."""
        allocator = self.row["allocator"]
        return None if allocator is None else float(allocator["reserved_bytes"]) / 1e9

    @property
    def paper_mib(self) -> float | None:
        """MiB of the cache as HeatKV and AMS-KV count them (`kvbench.engine.memory`); None in low-bit storage."""
        item = ITEM_BYTES.get(self.profile["cache_dtype"])
        # A stored token has two values of `item` bytes in each channel, and PAPER_BYTES as papers count.
        return None if item is None else self.row["kv"]["peak_bytes"] / (2 * item) * PAPER_BYTES / MIB


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


def read_timings(paths: Sequence[Path]) -> list[Timing]:
    """Return every row of files of `task=profile`, in order.

    Raises:
        ConfigError: a file is missing, or is not a file of `task=profile`.
    """
    timings: list[Timing] = []
    for path in dict.fromkeys(paths):
        try:
            contents = parse_json(read_text(path))
            timings += [Timing(contents, row) for row in contents["rows"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}: not a file of task=profile ({error}); delete the sweep's folder and start it again"
            ) from None
    return timings


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
    fulls = [
        other
        for other in timings
        if other.is_ok
        and (other.method, other.model, other.row["batch"]) == ("full", timing.model, timing.row["batch"])
    ]

    def prefer(other: Timing) -> tuple[bool, bool]:
        same = timing.find_setting("cuda_graph") == other.find_setting("cuda_graph")
        return other.profile is timing.profile, same

    return max(fulls, key=prefer, default=None)


def _save(timing: Timing, full: Timing | None) -> float | None:
    if full is None or timing.reserved_gb is None or full.reserved_gb is None:
        return None
    return 100 * (1 - timing.reserved_gb / full.reserved_gb)


def _make_title(table: PublishedTable | None, timings: Sequence[Timing]) -> str:
    models = sorted({timing.model for timing in timings})
    random = " (random weights)" if any(timing.profile["weights"] == "random" for timing in timings) else ""
    machine = timings[0].profile["provenance"]
    device = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
    measured = f"{', '.join(models)}{random}, {device}, torch {machine['versions']['torch']}"
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
