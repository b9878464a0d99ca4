"""`task=report`: tables and figures of finished runs."""

from pathlib import Path

from omegaconf import DictConfig

from kvbench.cli.console import CONSOLE, say
from kvbench.cli.sweeps.jobs import read_entries
from kvbench.cli.sweeps.outcomes import list_failures, list_runs
from kvbench.core.config import ConfigError
from kvbench.core.settings import Settings
from kvbench.report.calibrations import show_calibrations
from kvbench.report.collect import collect_runs, read_with_references
from kvbench.report.differences import show_differences
from kvbench.report.document import write_report
from kvbench.report.figures.draw import draw_figures
from kvbench.report.runs_table import show_runs


def report(_: DictConfig, settings: Settings) -> None:
    """Do `task=report`: tables and figures of every finished run under `runs_dir`, or of a sweep's.

    Raises:
        ConfigError: there is no finished run.
    """
    runs_dir, place = settings.runs_dir, settings.writes
    failures: list[tuple[str, str]] = []
    if settings.work.folder is None:
        runs = collect_runs(runs_dir)
    else:
        sweep = Path(settings.work.folder)
        place = sweep if settings.output is None else place
        entries = read_entries(sweep)
        runs, failures = read_with_references(list_runs(entries)), list_failures(entries)
    show_runs(CONSOLE, runs, failures)
    if not runs:
        raise ConfigError(
            f"runs_dir={runs_dir}: holds no finished runs"
            + " of this sweep" * (settings.work.folder is not None)
        )
    if settings.against is not None:
        show_differences(CONSOLE, runs, runs_dir, settings.against, settings.writes)
    show_calibrations(CONSOLE, runs, runs_dir, place, settings.against)
    figures, left_out = draw_figures(runs_dir, runs, place)
    for line in left_out:
        say(f"left out: {line}")
    if settings.published is None:
        path = write_report(place, runs, None, figures)
    else:
        from kvbench.report.papers import comparison, published

        table = published.find(settings.published)
        path = write_report(place, runs, comparison.make_section(table, runs), figures)
        comparison.show_comparison(CONSOLE, table, runs, runs_dir)
    for written in (path, path.with_suffix(".tex"), path.with_suffix(".csv"), *figures):
        say(f"written: {written}")
