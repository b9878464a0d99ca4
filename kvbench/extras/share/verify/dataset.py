"""Checks of a published dataset: its list of files, and its tables against the results of its runs."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.core.config import ConfigError
from kvbench.core.files import read_text
from kvbench.data.frames import TooLargeError, read_table
from kvbench.data.publication import FILE_LIST, RUNS_FILE, SAMPLES_FILE, list_changes
from kvbench.data.verification import WHOLE
from kvbench.extras.share.publish.dataset import CARD, PublishedRun, read_runs
from kvbench.extras.share.verify.record import is_close
from kvbench.extras.share.verify.verdict import Finding, Verdict
from kvbench.report.runs_table import make_rows
from kvbench.report.tables import format_markdown
from kvbench.runs.record.results import read_results


def verify_dataset(dataset: Path, folders: Sequence[Path]) -> Verdict:
    """Return the verdict on a dataset's files and tables; `folders` are its runs, with the layout of runs."""
    findings = list(_check_files(dataset))
    try:
        read = [(folder, read_results(folder)) for folder in folders]
        runs = [PublishedRun(folder, results) for folder, results in read if results is not None]
        findings += _check_runs_table(dataset, runs)
        findings += _check_card(dataset, runs)
    except Exception as error:  # a damaged table may raise anything; the runs are verified
        is_known = isinstance(error, ConfigError | OSError)
        said = str(error) if is_known else f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        findings.append(Finding("tables", said, not isinstance(error, TooLargeError)))
    return Verdict(WHOLE, tuple(findings), compared=f"{FILE_LIST}, {RUNS_FILE.as_posix()} and {CARD}")


def _check_files(dataset: Path) -> Iterator[Finding]:
    """Yield a finding for each file that differs from the list of files."""
    told = {"changed": "has another", "not listed": "does not list", "missing": "lists a missing"}
    try:
        for change in list_changes(dataset):
            yield Finding(FILE_LIST, f"{told[change.how]} {change.name}")
    except (OSError, ValueError) as error:
        yield Finding(FILE_LIST, f"cannot be read ({error})")


def _check_runs_table(dataset: Path, runs: Sequence[PublishedRun]) -> Iterator[Finding]:
    """Yield a finding for each row of runs.parquet that differs from the runs."""
    by_path = {run.path: run.results for run in runs}
    if not by_path:
        return
    tables = read_runs(by_path), read_table(dataset / RUNS_FILE, len(by_path))
    ours, theirs = ({row["folder"]: row for row in table.iter_rows(named=True)} for table in tables)
    for name in sorted(ours.keys() | theirs.keys()):
        first, second = ours.get(name, {}), theirs.get(name, {})
        wrong = [key for key in {**first, **second} if not is_close(first.get(key), second.get(key))]
        if wrong:
            yield Finding(RUNS_FILE.as_posix(), f"{wrong[0]} of {name} is not as in its results.json")


def _check_card(dataset: Path, runs: Sequence[PublishedRun]) -> Iterator[Finding]:
    """Yield a finding if the card's table has other rows than the runs' table, regardless of order."""
    ours = format_markdown(make_rows([run.results for run in runs])).splitlines()
    lines = read_text(dataset / CARD).splitlines() if (dataset / CARD).is_file() else []
    start = lines.index(ours[0]) if ours[0] in lines else len(lines)
    stop = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    if sorted(ours) != sorted(lines[start:stop]):
        yield Finding(CARD, "its table is not the table of the runs")


def read_rows(dataset: Path, run: str, samples: int) -> dict[int, Mapping[str, Any]]:
    """Return the rows of a run in samples.parquet by index of the sample; empty if there is no such file.

    Raises:
        TooLargeError: there are more rows than `samples`, or they are too large, see `read_table`.
    """
    path = dataset / SAMPLES_FILE
    if not path.is_file():
        return {}
    return {int(row["index"]): row for row in read_table(path, samples, run).iter_rows(named=True)}
