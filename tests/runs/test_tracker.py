"""Use of a run's logger: its check before a run, entries of finished runs, and calls of trackio."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.core.config import ConfigError
from kvbench.eval.protocol.scores import Metric
from kvbench.runs import execute
from kvbench.runs.record.results import Results, read_results
from kvbench.runs.score.trackio import Trackio
from tests.support.fake_run import job_in
from tests.support.results import made_up


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


RUN = made_up(
    "heatkv", 0.1, {"psnr": Metric(25.0, "higher"), "lpips": Metric(None, "lower", status="skipped")}
)


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The public functions of the package, which notes its calls; it is not among the packages of development."""
    calls: dict[str, Any] = {}
    run = SimpleNamespace(log=calls.update, finish=lambda: calls.update(finished=True))

    def init(**settings: object) -> SimpleNamespace:
        calls["init"] = settings
        module.config = settings["config"]
        return run

    spec = ModuleSpec("trackio", None)
    module = SimpleNamespace(init=init, config={"a": 1}, calls=calls, __spec__=spec)
    monkeypatch.setitem(sys.modules, "trackio", module)
    return module


def test_trackio_gets_config_and_numbers(tmp_path: Path, trackio: SimpleNamespace) -> None:
    Trackio("p", images=0, name="second", space="me/runs").send(tmp_path, RUN, "s" * 70)
    settings = trackio.calls["init"]
    assert (settings["project"], settings["name"]) == ("p", f"second-{RUN.run}")
    assert (settings["space_id"], settings["resume"]) == ("me/runs", "allow")
    assert len(settings["group"]) == 64
    assert settings["config"]["model"] == RUN.config["model"]
    assert (trackio.calls["psnr"], trackio.calls["finished"]) == (25.0, True)
    assert not {"lpips", "run"} & set(trackio.calls)
    assert trackio.config == {"a": 1}  # of the caller's own run, which stays open


@pytest.mark.parametrize("space", ["a b", "", "a/b/c", "me/runs"])
def test_what_trackio_refuses_is_refused_before_a_run(
    space: str, trackio: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    Trackio().check()
    with pytest.raises(ConfigError, match=r"logger\.space=.*: (must be a Space|the Hub knows no user)"):
        Trackio(space=space).check()
