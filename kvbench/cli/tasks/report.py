"""`task=report`: tables and figures of finished runs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig

from kvbench.cli.config.compose import list_words
from kvbench.cli.console import CONSOLE, say
from kvbench.cli.sweeps.outcomes import list_failures, list_profiles, list_runs
from kvbench.core.config import ConfigError
from kvbench.core.settings import Settings
from kvbench.report.code_notes import keep_newest
from kvbench.report.collect import collect_runs, read_with_references
from kvbench.report.conditions import keep_one_count
from kvbench.report.differences import find_pairs, show_calibrations, show_differences
from kvbench.report.document import Section, make_tail, write_report
from kvbench.report.figures.draw import draw_figures
from kvbench.report.latex import write_paper
from kvbench.report.paper_tables import check_metrics, make_paper_tables
from kvbench.report.papers.speed import show_speed
from kvbench.report.row_keys import Composed, write_keys
from kvbench.report.runs_table import order_runs, show_runs
from kvbench.report.seeds import combine_seeds, list_members
from kvbench.report.tables import print_line
from kvbench.report.timings import read_timings
from kvbench.runs.record.repeat import find_key
from kvbench.runs.record.results import Results
from kvbench.runs.record.sweeps import JobStatus, read_entries

SWEEP_FOLDER = "report"
"""Folder of a report inside the folder of its sweep."""


def report(cfg: DictConfig, settings: Settings) -> None:
    """Run `task=report`: tables and figures of every finished run under `runs_dir`, or of a sweep's runs.

    All files are written to one folder, whose path is the last line. A sweep of `task=profile` has one table, of times.

    Raises:
        ConfigError: there is no finished run, none of `prompts.count` samples, or none with a metric of
            `report.metrics`.
    """
    runs_dir, chosen = settings.runs_dir, settings.report
    sweep = settings.work.folder
    entries = [] if sweep is None else read_entries(Path(sweep))
    runs, failures, place = _read_runs(settings, entries)
    if not runs and (timed := list_profiles(entries)):
        show_runs(CONSOLE, [], failures)
        show_speed(CONSOLE, settings.published, timed, place)
        return
    runs = _keep_code(runs, settings)
    if sweep is None:
        runs = _keep_count(runs, cfg)
    if runs:
        check_metrics(runs, chosen.metrics or ())
    joined = combine_seeds(runs, runs_dir)
    rows = joined if chosen.seeds == "mean" else runs
    if settings.against is not None and runs:
        find_pairs(rows, settings.against)  # a wrong name is an error before the tables
    show_runs(CONSOLE, rows, failures, verbose=settings.verbose, as_given=sweep is not None)
    if not runs:
        raise ConfigError(
            f"runs_dir={runs_dir}: holds no finished runs" + " of this sweep" * (sweep is not None)
        )
    if settings.against is not None:
        show_differences(CONSOLE, rows, runs_dir, settings.against, place)
    show_calibrations(CONSOLE, joined, runs_dir, place, settings.against)
    figures, left_out = draw_figures(runs_dir, rows, place, chosen.metrics)
    for line in left_out:
        say(f"left out: {line}")
    tables = [make_tail(runs_dir, rows)]
    if settings.published is not None:
        tables.append(show_published(cfg, settings.published, rows, entries, place))
    path = write_report(place, rows, [table for table in tables if table is not None], figures)
    keys = write_keys(path.with_suffix(".csv"), _compose_rows(rows))
    paper = write_paper(place, make_paper_tables(rows, runs_dir, chosen, settings.against))
    files = (path, path.with_suffix(".tex"), path.with_suffix(".csv"), keys, *paper)
    say(f"written: {', '.join(file.name for file in files)}; figures: {len(figures)}")
    say(f"report: {place}")


def _read_runs(
    settings: Settings, entries: Sequence[JobStatus]
) -> tuple[list[Results], list[tuple[str, str]], Path]:
    """Return the runs of a report, the (name, reason) of unfinished runs, and the folder of its files."""
    if settings.work.folder is None:
        return collect_runs(settings.runs_dir), [], settings.writes
    folder = Path(settings.work.folder)
    place = folder / SWEEP_FOLDER if settings.output is None else settings.writes
    return read_with_references(list_runs(entries)), list_failures(folder, entries), place


def _keep_code(runs: list[Results], settings: Settings) -> list[Results]:
    """Return the runs that `report.code` selects; print how many are left out."""
    if settings.report.code == "all":
        return runs
    kept = keep_newest(runs, settings.against)
    if len(kept) < len(runs):
        print_line(
            CONSOLE, f"left out: {len(runs) - len(kept)} runs of earlier code; report.code=all has them", ""
        )
    return kept


def _keep_count(runs: list[Results], cfg: DictConfig) -> list[Results]:
    """Return the runs of one number of samples (`keep_one_count`); print how many other runs are left out."""
    is_given = any(word.startswith("prompts.count=") for word in list_words())
    kept = keep_one_count(runs, cfg.prompts.get("count") if is_given else None)
    others = Counter(run.n for run in runs) - Counter(run.n for run in kept)
    if others:
        each = (f"{count} of n = {n} (prompts.count={n} shows these)" for n, count in sorted(others.items()))
        print_line(CONSOLE, f"left out: runs of other n: {', '.join(each)}", "")
    return kept


def _compose_rows(rows: Sequence[Results]) -> Iterator[Composed]:
    """Yield what each run of a table's rows was composed of, in the order of report.csv."""
    for run in (run for row in order_runs(rows) for run in list_members(row)):
        words = (
            None if run.overrides is None else [word for word in run.overrides if find_key(word) != "eval"]
        )
        yield run.run, words, run.config


def show_published(
    cfg: DictConfig,
    name: str | Sequence[str],
    runs: Sequence[Results],
    entries: Sequence[JobStatus],
    place: Path,
) -> Section | None:
    """Print the published table, or several metric by metric, beside what was measured; return one as a section.

    Args:
        cfg: configuration of the sweep, which names its model.
        name: name of the table, or names.
        runs: finished runs, as `combine_seeds` returns them.
        entries: jobs of the sweep, whose files are read too.
        place: folder of the written files.
    """
    from kvbench.report.papers import by_metric, comparison, published, stability  # take long to import

    if not isinstance(name, str):
        by_metric.show_by_metric(CONSOLE, list(name), runs, read_timings(list_profiles(entries)), place)
        return None
    table = published.find(name)
    if table.figure == "stability":
        artifacts = [Path(file) for entry in entries for file in entry.files]
        stability.show_stability(CONSOLE, table, artifacts, int(cfg.sinks), str(cfg.model.name), place)
        return None
    return comparison.show_comparison(CONSOLE, table, runs, place)
