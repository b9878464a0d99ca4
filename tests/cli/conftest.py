"""Fixture of the tests of workers."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.cli.workers import work
from kvbench.runs.record.sweeps import read_entries
from tests.support.command_line import Command

Do = Callable[[int], object]
"""Body of a job, called with the number of the job."""


RunWorker = Callable[..., tuple[int, str, list[int]]]
"""Runs a worker on a folder's jobs; gives exit status, what was printed and the numbers of jobs as they were tried."""


@pytest.fixture
def run_worker(command: Command, monkeypatch: pytest.MonkeyPatch) -> RunWorker:
    def run(folder: Path, do: Do, host: str = "node0") -> tuple[int, str, list[int]]:
        jobs, tried = [entry.overrides for entry in read_entries(folder)], list[int]()

        def do_job(overrides: tuple[str, ...], *_: object, **__: object) -> object:
            tried.append(jobs.index(overrides))
            return do(tried[-1])

        monkeypatch.setattr(work, "gethostname", lambda: host)
        monkeypatch.setattr(work, "do_job", do_job)
        status, out, err = command("task=work", f"work.folder={folder}", "eval=none")
        return status, out + err, tried

    return run
