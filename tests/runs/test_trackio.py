"""trackio gets what results.json says: read back from the database that the package itself writes."""

import json
import sqlite3
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.core.config import ConfigError
from kvbench.eval.protocol.scores import Metric
from kvbench.runs.score.trackio import Trackio
from tests.support.results import made_up

RUN = made_up(
    "heatkv", 0.1, {"psnr": Metric(25.0, "higher"), "lpips": Metric(None, "lower", status="skipped")}
)


def test_trackio_gets_config_and_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the package's public functions, where it is not installed too."""
    calls: dict[str, Any] = {}
    run = SimpleNamespace(log=calls.update, finish=lambda: calls.update(finished=True))

    def init(**settings: object) -> SimpleNamespace:
        calls["init"] = settings
        module.config = settings["config"]
        return run

    module = SimpleNamespace(init=init, config={"a": 1}, __spec__=ModuleSpec("trackio", None))
    monkeypatch.setitem(sys.modules, "trackio", module)
    Trackio("p", images=0, name="second", space="me/runs").send(tmp_path, RUN, "s" * 70)
    settings = calls["init"]
    assert (settings["project"], settings["name"]) == ("p", f"second-{RUN.run}")
    assert (settings["space_id"], settings["resume"]) == ("me/runs", "allow")
    assert len(settings["group"]) == 64
    assert settings["config"]["model"] == RUN.config["model"]
    assert (calls["psnr"], calls["finished"]) == (25.0, True)
    assert not {"lpips", "run"} & set(calls)
    assert module.config == {"a": 1}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of the real package, which reads the variable when it is imported and sends nothing."""
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder))
        patch.delenv("TRACKIO_SPACE_ID", raising=False)
        pytest.importorskip("trackio")
        yield folder


def read_logs(home: Path, project: str, name: str) -> list[dict[str, Any]]:
    """Values of every step of an entry."""
    with sqlite3.connect(home / f"{project}.db") as database:
        rows = database.execute(
            "SELECT metrics FROM metrics WHERE run_name = ? ORDER BY step", (name,)
        ).fetchall()
    return [json.loads(row) for (row,) in rows]


def read_config(home: Path, project: str, name: str) -> dict[str, Any]:
    with sqlite3.connect(home / f"{project}.db") as database:
        [(text,)] = database.execute("SELECT config FROM configs WHERE run_name = ?", (name,)).fetchall()
    return dict(json.loads(text))


def test_a_run_arrives_and_is_updated(
    home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    for _ in range(2):
        Trackio("once", images=0).send(tmp_path, RUN, "budget")
    logs = read_logs(home, "once", RUN.run)
    assert len(logs) == 2
    assert (logs[1]["psnr"], logs[1]["latency/seconds_per_image"]) == (25.0, 0.125)
    assert logs[1]["memory/peak_tokens"] == RUN.memory.peak_tokens
    assert not {"lpips", "run"} & set(logs[1])
    config = read_config(home, "once", RUN.run)
    assert (config["_Group"], config["job_type"], config["reference"]) == ("budget", "heatkv", "full-0")
    assert config["tags"] == ["infinity_tiny", "?", "budget 0.1"]
    assert config["model"] == RUN.config["model"]
    assert capfd.readouterr().out == ""
    assert not [one for one in recwarn if "Reserved" in str(one.message)]


def test_the_callers_own_run_stays_open(home: Path, tmp_path: Path) -> None:
    import trackio

    trackio.init("mine", name="own", config={"a": 1}, embed=False, auto_log_cpu=False)
    trackio.log({"x": 1})
    Trackio("other", images=0).send(tmp_path, RUN)
    assert trackio.config["a"] == 1  # type: ignore[call-overload]
    trackio.log({"x": 2})
    trackio.finish()
    assert [row["x"] for row in read_logs(home, "mine", "own")] == [1, 2]
    assert "x" not in read_logs(home, "other", RUN.run)[0]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"space": "a b"}, r"logger\.space='a b': must be a Space of the Hub, owner/name"),
        ({"space": ""}, r"logger\.space='': must be a Space of the Hub"),
        ({"space": "a/b/c"}, r"logger\.space='a/b/c': must be a Space"),
        (
            {"space": "me/runs"},
            r"logger\.space=me/runs: the Hub knows no user here; run `hf auth login`, or set",
        ),
        ({"project": " "}, r"logger\.project= : must be a name"),
        ({"images": -1}, r"images=-1: must be at least 0"),
    ],
)
def test_what_trackio_refuses_is_refused_before_a_run(
    settings: dict[str, Any], line: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    Trackio().check()
    with pytest.raises(ConfigError, match=line):
        Trackio(**settings).check()
