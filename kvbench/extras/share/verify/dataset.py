"""Checks of a published dataset: its list of files, and its tables against the results of its runs."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.core.config import ConfigError
from kvbench.core.files import read_text
from kvbench.data.bounded import TooLargeError, read_table
from kvbench.data.publication import FILE_LIST, RUNS_FILE, SAMPLES_FILE, list_foreign, list_lost
from kvbench.data.verification import WHOLE
from kvbench.eval.files.samples import read_samples
from kvbench.extras.share.publish.dataset import CARD, PublishedRun, read_runs
from kvbench.extras.share.verify.records import is_close
from kvbench.extras.share.verify.verdict import Finding, Verdict
from kvbench.report.runs_table import make_rows
from kvbench.report.tables import format_markdown
from kvbench.runs.record.folder import RECORDS
from kvbench.runs.record.results import read_results


def verify_dataset(dataset: Path, folders: Sequence[Path]) -> Verdict:
    """Return the verdict on a dataset's files and tables.

    Args:
        dataset: folder of the dataset.
        folders: its runs, with the layout of runs.
    """
    findings = dict.fromkeys((*_check_files(dataset), *_check_tables(dataset, folders)))
    return Verdict(WHOLE, tuple(findings), compared=f"{FILE_LIST}, {RUNS_FILE.as_posix()} and {CARD}")


def _check_files(dataset: Path) -> Iterator[Finding]:
    """Yield a finding for each file that is not as the list of files has it."""
    try:
        foreign, lost = list_foreign(dataset), list_lost(dataset)
    except (OSError, ValueError) as error:
        yield Finding(FILE_LIST, f"cannot be read ({error})")
        return
    for name in foreign:
        yield Finding(
            FILE_LIST, f"does not list {name}" if "(changed)" not in name else f"has another {name}"
        )
    for name in lost:
        yield Finding(FILE_LIST, f"lists {name}, which is missing")


def _check_tables(dataset: Path, folders: Sequence[Path]) -> Iterator[Finding]:
    """Yield what each check of tables and card finds, or why it could not be made."""
    try:
        found = {folder: read_results(folder) for folder in folders}
    except ConfigError as error:
        yield Finding("tables", str(error), True)
        return
    runs = [PublishedRun(folder, results) for folder, results in found.items() if results is not None]
    for check in (_check_runs_table, _check_samples_table, _check_card):
        try:
            yield from check(dataset, runs)
        except TooLargeError as error:
            yield Finding("tables", str(error))
        except (ConfigError, OSError) as error:
            yield Finding("tables", str(error), True)
        except Exception as error:  # a damaged table may raise anything; the runs are verified
            said = " ".join(str(error).split())
            yield Finding("tables", f"{type(error).__name__}: {said:.200}", True)


def _check_runs_table(dataset: Path, runs: Sequence[PublishedRun]) -> Iterator[Finding]:
    """Yield a finding for each row of runs.parquet that the runs do not give."""
    places = {run.path: run.results for run in runs}
    if places:
        ours = {row["folder"]: row for row in read_runs(places).iter_rows(named=True)}
        table = read_table(dataset / RUNS_FILE, len(places))
        theirs = {row["folder"]: row for row in table.iter_rows(named=True)}
        for name in sorted(ours.keys() | theirs.keys()):
            if (column := _find_difference(ours.get(name), theirs.get(name))) is not None:
                yield Finding(RUNS_FILE.as_posix(), f"{column} of {name} is not as in its results.json")


def _check_card(dataset: Path, runs: Sequence[PublishedRun]) -> Iterator[Finding]:
    """Yield a finding for a table of the card that the runs do not give."""
    table = format_markdown(make_rows([run.results for run in runs]))
    if sorted(table.splitlines()) != sorted(_list_table(dataset / CARD, table)):
        yield Finding(CARD, "its table is not the table of the runs")


def _check_samples_table(dataset: Path, runs: Sequence[PublishedRun]) -> Iterator[Finding]:
    """Yield a finding for each run whose prompts or seeds differ between samples.parquet and samples.jsonl."""
    for run in runs:
        known = [(one.index, one.prompt, one.seed) for one in read_samples(run.folder / RECORDS).values()]
        table = read_table(dataset / SAMPLES_FILE, len(known), run.path)
        rows = table.select("index", "prompt", "seed").rows()
        if sorted(rows) != sorted(known):
            text = f"prompts or seeds of {run.path} are not as in its {RECORDS}"
            yield Finding(SAMPLES_FILE.as_posix(), text)


def _find_difference(ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None) -> str | None:
    """Return the first column in which two rows differ; None without one."""
    if ours is None or theirs is None:
        return "the row"
    names = [*ours, *(name for name in theirs if name not in ours)]
    return next((name for name in names if not is_close(ours.get(name), theirs.get(name))), None)


def _list_table(card: Path, table: str) -> list[str]:
    """Return the lines of a card's table of runs, which begins with the same heading as `table`."""
    heading = table.splitlines()[0]
    lines = read_text(card).splitlines() if card.is_file() else []
    start = lines.index(heading) if heading in lines else len(lines)
    stop = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    return lines[start:stop]


def read_rows(dataset: Path, run: str, samples: int) -> dict[int, Mapping[str, Any]]:
    """Return the rows of a run in samples.parquet by the index of the sample; none if there is no such file.

    Raises:
        TooLargeError: there are more of them than the run has samples, or they hold too much, see `read_table`.
    """
    path = dataset / SAMPLES_FILE
    if not path.is_file():
        return {}
    return {int(row["index"]): row for row in read_table(path, samples, run).iter_rows(named=True)}
