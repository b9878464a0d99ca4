"""`task=status` without a sweep: a list of all sweeps and of runs in progress; imports no torch."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbench.cli.sweeps.jobs import PLAN, read_name
from kvbench.cli.sweeps.progress import format_seconds, measure
from kvbench.core.claims import is_held
from kvbench.core.config import ConfigError
from kvbench.runs.record.earlier import OF_EARLIER_VERSION, list_earlier

COLUMNS = ("done", "running", "failed", "missing", "samples", "time left", "started")


def show_all(console: Console, runs_dir: Path) -> None:
    """Print the progress of every sweep, the latest first, and the runs in progress and of an earlier version.

    Raises:
        ConfigError: there is none of these.
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
        console.print(_list_sweeps(rows))
    lines = [*damaged, f"runs in progress: {len(running)}", *(f"  {folder}" for folder in running)]
    if earlier:
        lines += [f"runs {OF_EARLIER_VERSION}: {len(earlier)}", *(f"  {folder}" for folder in earlier)]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def find_running_folders(runs_dir: Path) -> list[Path]:
    """Return the folders of runs and references that a process generates or scores now."""
    claims = (path for path in runs_dir.glob("*/*/.*") if path.parent.parent.name != "sweeps")
    return sorted({path.parent for path in claims if is_held(path)})


def _list_sweeps(rows: Mapping[Path, Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("sweep", overflow="fold")
    for name in COLUMNS:
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("folder", overflow="fold")
    for folder, cells in rows.items():
        table.add_row(Text(read_name(folder) or "-"), *cells, Text(str(folder)))
    return table


def _make_cells(folder: Path) -> list[str]:
    now = measure(folder)
    return [
        *(str(count) for count in (now.finished, now.running, now.failed, now.missing)),
        f"{now.drawn}/{now.samples}",
        format_seconds(now.seconds),
        _format_time((folder / PLAN).stat().st_mtime),
    ]


def _format_time(seconds: float) -> str:
    """Return a file's time; a dash if no calendar has it."""
    try:
        return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        return "-"
