"""Lines about the jobs of a sweep that ended."""

from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.console import CONSOLE, say
from kvbench.cli.sweeps.jobs import Entry, read_entries
from kvbench.report.collect import read_runs
from kvbench.report.one_run import describe_run, show_outcome
from kvbench.runs.record.results import Outcome


class EndedJobs:
    """Prints a line when a job of a sweep ends, whichever process it runs in; jobs themselves print nothing.

    Args:
        folder: folder of the sweep.
        verbose: print every metric of a finished run in place of its line.
    """

    def __init__(self, folder: Path, *, verbose: bool) -> None:
        self._folder, self._verbose = folder, verbose
        entries = read_entries(folder)
        self._shown = {entry.number for entry in entries if entry.outcome == "finished"}
        if self._shown:
            say(f"{len(self._shown)} of {len(entries)} jobs found finished")

    def show(self) -> None:
        """Print the jobs that ended since the latest call."""
        entries = read_entries(self._folder)
        ended = {entry.number for entry in entries if entry.outcome in ("finished", "failed")}
        names = name_jobs(entries)
        width = max(map(len, names), default=0)
        for number in sorted(ended - self._shown):
            self._show_job(entries[number], names[number].ljust(width))
        self._shown = ended

    def _show_job(self, entry: Entry, name: str) -> None:
        if entry.outcome == "failed":
            say(f"{name}  failed: {entry.error}", "red")
        for run in read_runs([Path(entry.folder)]) if entry.folder else ():
            if self._verbose:
                show_outcome(CONSOLE, Outcome(Path(str(entry.folder)), run))
            else:
                say(f"{name}  {describe_run(run)}")


def name_jobs(entries: Sequence[Entry]) -> list[str]:
    """Return the overrides of each job that not all jobs share; all of them if there is one job."""
    shared = set.intersection(*(set(entry.overrides) for entry in entries)) if len(entries) > 1 else set()
    return [
        " ".join(word.removeprefix("method=") for word in entry.overrides if word not in shared)
        for entry in entries
    ]
