"""`task=status`: tables of a sweep's runs and workers, or of all sweeps; imports no torch."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbench.cli.sweeps.progress import count_drawn, find_states, format_seconds, measure, measure_pace
from kvbench.cli.workers.control import describe_host, read_hold, read_stopped_hosts
from kvbench.cli.workers.log import WorkerLog, read_logs
from kvbench.core.claims import is_held
from kvbench.core.config import ConfigError
from kvbench.runs.record.earlier import OF_EARLIER_VERSION, list_earlier
from kvbench.runs.record.sweeps import PLAN, JobStatus, name_jobs, read_entries, read_name

MAX_ROWS = 40
"""Maximum number of rows of a table without `verbose`."""
ORDER = ("running", "failed", "interrupted", "dropped", "missing", OF_EARLIER_VERSION, "done")
"""States of runs in the order of the table."""
LONG_COLUMNS = ("settings", "worker", "latest run", "sweep")
"""Columns whose cells break into lines."""
SWEEP_COLUMNS = ("done", "running", "failed", "missing", "samples", "time left", "started")
COLOURS = {"running": "green", "failed": "red", "interrupted": "yellow", "dropped": "yellow"}


class Row(NamedTuple):
    """Row of a run in the table of a sweep's runs."""

    entry: JobStatus
    state: str
    samples: str
    rate: str
    left: str


def show_status(console: Console, folder: Path, *, verbose: bool = False) -> None:
    """Print the progress of a sweep, its runs and its workers; `verbose` lists all of them."""

    def say(line: str, style: str | None = None) -> None:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)

    entries, logs = read_entries(folder), read_logs(folder)
    shared = set.intersection(*(set(entry.overrides) for entry in entries)) if len(entries) > 1 else set()
    say(f"{folder}: {len(entries)} jobs")
    if shared:
        say("all jobs: " + " ".join(word for word in entries[0].overrides if word in shared))
    states = find_states(folder, entries)
    say(str(measure(folder, entries, states)))
    for host, reason in read_stopped_hosts(folder).items():
        say(describe_host(host, reason), "red")
    if read_hold(folder) == "pause":
        say("paused: work.do=resume lets workers go on", "yellow")
    rows = [_make_row(folder, *one) for one in zip(entries, states, strict=True)]
    rows.sort(key=lambda row: ORDER.index(row.state))
    console.print(_list_runs(rows, shared, MAX_ROWS * (not verbose) or len(entries)))
    if logs:
        say(_count_hours(logs))
        console.print(_list_workers(logs, MAX_ROWS * (not verbose) or len(logs)))


def _make_row(folder: Path, entry: JobStatus, state: str) -> Row:
    drawn, count, pace = 0, 0, None
    if entry.samples:
        own = Path(entry.folder or next(iter(entry.samples)))
        count = entry.samples.get(str(own), 0)
        drawn = count_drawn(own, count)
        pace = measure_pace(folder, [own]) if state == "running" else None
    left = None if pace is None else pace * (count - drawn)
    rate = "-" if pace is None else f"{1 / pace:.3g}"
    return Row(entry, state, f"{drawn}/{count}" if count else "-", rate, format_seconds(left))


def _list_runs(rows: Sequence[Row], shared: Iterable[str], shown: int) -> Table:
    columns = ("run", "state", "samples", "samples/s", "time left", "settings")
    table = _make_table(columns, _count_rest(len(rows), shown, "runs"))
    for entry, state, *figures in rows[:shown]:
        words = " ".join(word for word in entry.overrides if word not in shared)
        if state in ("running", "failed", "interrupted") and entry.host:
            words += f" on {entry.host}"
        reason = f"\n{entry.error}" if state not in ("done", "dropped") and entry.error else ""
        coloured = Text(state, COLOURS.get(state, ""))
        table.add_row(str(entry.number), coloured, *figures, Text(words).append(reason, "red"))
    return table


def _list_workers(logs: Sequence[WorkerLog], shown: int) -> Table:
    first = sorted(logs, key=lambda log: not log.alive)
    columns = ("worker", "device", "state", "samples", "samples/s", "hours", "latest run")
    table = _make_table(columns, _count_rest(len(logs), shown, "workers"))
    for log in first[:shown]:
        table.add_row(
            Text(log.name),
            log.device,
            "working" if log.alive else "ended",
            str(log.samples),
            "-" if log.rate is None else f"{log.rate:.3g}",
            f"{log.seconds / 3600:.2f}",
            Text(log.blocks[-1].run if log.blocks else "-"),
        )
    return table


def _count_hours(logs: Sequence[WorkerLog]) -> str:
    """Return the numbers of working and ended workers, and their hours by GPU and CPU."""
    used = {"GPU-hours": [log for log in logs if log.device.startswith("cuda")]}
    used["CPU worker-hours"] = [log for log in logs if log not in used["GPU-hours"]]
    hours = [f"{sum(log.seconds for log in some) / 3600:.2f} {unit}" for unit, some in used.items() if some]
    working = sum(log.alive for log in logs)
    return f"workers: {working} working, {len(logs) - working} ended; used: {', '.join(hours)}"


def _make_table(columns: Sequence[str], caption: str | None = None) -> Table:
    table = Table(box=None, pad_edge=False, caption=caption, caption_justify="left")
    for name in columns:
        if name in LONG_COLUMNS:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, no_wrap=True, justify="left" if name in ("state", "device") else "right")
    return table


def _count_rest(count: int, shown: int, what: str) -> str | None:
    return f"and {count - shown} more {what}; verbose=true lists all" if count > shown else None


def show_all(console: Console, runs_dir: Path) -> None:
    """Print the progress of every sweep, the latest first, and the runs in progress and of an earlier version.

    Raises:
        ConfigError: there are no sweeps and no such runs.
    """
    plans = sorted(runs_dir.glob(f"sweeps/*/{PLAN}"), key=lambda path: path.stat().st_mtime, reverse=True)
    running, earlier = find_running_folders(runs_dir), list_earlier(runs_dir)
    if not (plans or running or earlier):
        raise ConfigError(f"runs_dir={runs_dir}: holds no sweeps, and no run is in progress")
    rows, damaged = {}, []
    for folder in (plan.parent for plan in plans):
        try:
            rows[folder] = _make_cells(folder)
        except ConfigError as error:
            damaged.append(str(error))
    if rows:
        table = _make_table(("sweep", *SWEEP_COLUMNS))
        for cells in rows.values():
            table.add_row(*map(Text, cells))
        console.print(table)
    jobs = {folder: name_jobs(read_entries(folder)) for folder in rows}
    lines = [
        f"{folder}: {' ... '.join(dict.fromkeys((own[0], own[-1])))}" for folder, own in jobs.items() if own
    ]
    lines += [*damaged, f"runs in progress: {len(running)}", *(f"  {folder}" for folder in running)]
    if earlier:
        lines += [f"runs {OF_EARLIER_VERSION}: {len(earlier)}", *(f"  {folder}" for folder in earlier)]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def find_running_folders(runs_dir: Path) -> list[Path]:
    """Return the folders of runs and references that a process generates or scores now."""
    claims = (path for path in runs_dir.glob("*/*/.*") if path.parent.parent.name != "sweeps")
    return sorted({path.parent for path in claims if is_held(path)})


def _make_cells(folder: Path) -> list[str]:
    entries = read_entries(folder)
    now = measure(folder, entries, find_states(folder, entries))
    return [
        read_name(folder) or folder.name[:8],
        *(str(count) for count in (now.finished, now.running, now.failed, now.missing)),
        f"{now.drawn}/{now.samples}",
        format_seconds(now.seconds),
        f"{datetime.fromtimestamp((folder / PLAN).stat().st_mtime):%Y-%m-%d %H:%M}",
    ]
