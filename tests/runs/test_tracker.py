"""Use of a run's logger: its check before a run, and entries of finished runs."""

from pathlib import Path

import pytest

from kvbench.core.config import ConfigError
from kvbench.runs import execute
from kvbench.runs.record.results import Results, read_results
from tests.support.fake_run import job_in


def test_finished_run_is_sent_to_the_logger(tmp_path: Path) -> None:
    sent: list[tuple[str, Path, str | None]] = []

    class Recorder:
        def send(self, folder: Path, results: Results, sweep: str | None) -> None:
            sent.append((results.run, folder, sweep))

    outcome = execute.run(job_in(tmp_path, logger=Recorder()))
    again = execute.run(job_in(tmp_path, logger=Recorder(), sweep="budget"))
    assert sent == [
        (outcome.folder.name, outcome.folder, None),
        (again.folder.name, outcome.folder, "budget"),
    ]


def test_a_logger_that_fails_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def send(self, *_: object) -> None:
            raise RuntimeError("no\nconnection")

    outcome = execute.run(job_in(tmp_path, logger=Failing()))
    assert read_results(outcome.folder) == outcome.results
    assert (outcome.folder / "status").read_text() == "done\n"
    [line] = [record.getMessage() for record in caplog.records if "was not sent" in record.getMessage()]
    assert line.startswith(f"{outcome.folder.name} was not sent: no connection; ")


def test_what_a_logger_refuses_is_told_before_a_run(tmp_path: Path) -> None:
    class Refusing:
        def check(self) -> None:
            raise ConfigError("logger.project=a/b: refused")

    with pytest.raises(ConfigError, match="refused"):
        execute.run(job_in(tmp_path, logger=Refusing()))
    assert not [*tmp_path.iterdir()]
