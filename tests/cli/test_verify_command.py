"""`kvbench verify`: a run of a class that is not kvbench's, and words that are refused."""

import json
import sys
from pathlib import Path

import pytest

from kvbench.cli.tasks.recorded import RecordedJobs, check_targets
from kvbench.cli.tasks.verify import VerifyRequest, parse_words
from kvbench.core.config import ConfigError
from kvbench.core.files import resolve_path
from tests.support.command_line import Command

OWN = """
from dataclasses import dataclass
from pathlib import Path
from kvbench.methods.streaming_llm import StreamingLLM

Path({marker!r}).touch()

@dataclass(eq=False)
class Mine(StreamingLLM):
    revision = 0
"""
FULL = "kvbench.methods.full.Full"


def forget(monkeypatch: pytest.MonkeyPatch, before: list[str]) -> None:
    """Make the module of the run unknown again."""
    sys.modules.pop("own_method", None)
    monkeypatch.setattr(sys, "path", before)


@pytest.mark.slow
def test_foreign_code_runs_only_if_it_is_named(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker, before = tmp_path / "was_run", list(sys.path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own_method.py").write_text(OWN.format(marker=str(marker)))
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    status, _, err = command(
        "method=streaming_llm", "method._target_=own_method.Mine", "budget=0.1", "smoke=true"
    )
    assert status == 0, err
    [run] = Path("runs/infinity_tiny").glob("streaming_llm-*")
    marker.unlink()
    forget(monkeypatch, before)
    status, out, _ = command("verify", str(run), "samples=1")
    assert (status, marker.exists()) == (1, False)
    assert "not verifiable here" in out
    assert "own_method.Mine: code that is not kvbench's is not run" in out
    status, out, err = command("verify", str(run), "samples=1", f"code={run}/source", "out=a.json")
    assert (status, marker.exists()) == (0, True), out + err
    outcome = json.loads(Path("a.json").read_text())
    assert [one["status"] for one in outcome["runs"]] == ["verified", "verified"]
    assert "**Verified**" in outcome["badge"]
    forget(monkeypatch, before)
    source = run / "source" / "own_method.py"
    source.write_text(source.read_text().replace("revision = 0", "revision = 0\n    more = 1"))
    status, out, _ = command("verify", str(run), "samples=1", f"code={run}/source")
    assert status == 1
    assert "differs: infinity_tiny/streaming_llm" in out
    assert "code of method: own_method.Mine has other code here than in the record" in out
    forget(monkeypatch, before)


@pytest.mark.parametrize(
    "target",
    [
        "os.system", "subprocess.Popen", "kvbench.core.files.write_whole", "hydra.utils.instantiate", "kvbench",
        # what modules of kvbench, and of named code, import
        "kvbench.eval.protocol.base.write_whole", "kvbench.eval.files.samples.Path",
        "kvbench.models.next_token.torch.load", "yaml.io.FileIO", "yaml.load", "kvbench.scenes.detector.detect",
    ],
)  # fmt: skip
def test_a_stored_configuration_names_classes_of_kvbench_alone(target: str) -> None:
    for node in ({"base": [{"_target_": target}]}, {"_target_": FULL, "_args_": [{"_target_": target}]}):
        with pytest.raises(ConfigError, match="is not run"):
            check_targets(node, "method", ["os", "subprocess", "hydra", "yaml"])
    if target != "kvbench.scenes.detector.detect":
        getter = {"_target_": "hydra.utils.get_method", "path": target, "_partial_": True}
        with pytest.raises(ConfigError, match="is not run"):
            check_targets(getter, "eval", ["os"])


def test_classes_of_kvbench_and_its_functions_that_are_not_called_pass() -> None:
    check_targets({"_target_": FULL}, "method", [])
    check_targets(
        {"_target_": "hydra.utils.get_method", "path": "kvbench.scenes.detector.detect"}, "eval", []
    )
    with pytest.raises(ConfigError, match="cannot be imported"):
        check_targets({"_target_": "kvbench.methods.full.Fuller"}, "method", [])
    with pytest.raises(ConfigError, match="interpolation"):
        check_targets({"path": "${oc.env:HOME}"}, "model", [])


def test_only_files_of_names_of_kvbench_or_the_user_are_read(tmp_path: Path) -> None:
    names = "pkg://kvbench/assets/infinity_emoji/names.csv"
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "names.csv").write_bytes(resolve_path(names).read_bytes())
    secret = tmp_path / "secret"
    secret.write_text("a secret")
    (tmp_path / "weights" / "damaged").write_text("a secret")
    mine = RecordedJobs(tmp_path, weights=tmp_path / "weights")
    assert [mine._find_captions(one) for one in ("scenes", names)] == ["scenes", names]
    assert mine._find_captions("/elsewhere/names.csv") == str(tmp_path / "weights" / "names.csv")
    outside = f"pkg://kvbench/../{secret}"
    for captions in (str(secret), outside, "pkg://kvbench/../kvbench/assets", "..", "", None, "damaged"):
        for jobs in (mine, RecordedJobs(tmp_path)):
            with pytest.raises(ConfigError, match=r"model.captions=.*: is no") as error:
                jobs._find_captions(captions)
            assert "a secret" not in str(error.value)


def test_words_are_parsed(tmp_path: Path) -> None:
    words = [str(tmp_path), "samples=2", "seed=9", "code=a,b", "out=x.json", "by= Eve "]
    assert parse_words(words) == VerifyRequest(tmp_path, 2, 9, Path("x.json"), None, ("a", "b"), "Eve")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "0 folders given"),
        (["a", "b"], "2 folders given"),
        (["a", "sample=3"], "verify: sample=3: no such key"),
        (["a", "samples="], "no such key or no value"),
        (["a", "samples=0"], "samples=0: must be a whole number from 1"),
        (["a", "samples=two"], "samples=two: must be a whole number"),
        (["a", "seed=-1"], "seed=-1: must be a whole number from 0"),
        (["a", "seed=1.5"], "seed=1.5: must be a whole number"),
        (["a", "by= "], "by=' ': must be a name of 1 to 80"),
        (["a", "weights=nowhere"], "weights=nowhere: no such folder"),
        (["a", "out=x.txt"], "must be a file name that ends with .json"),
    ],
)
def test_wrong_words_end_in_one_line(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_words(words)


def test_folders_without_runs_end_in_one_line(command: Command, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for words, said in (
        (["nowhere"], "verify: nowhere: no such folder"),
        (["empty"], "verify: empty: holds no run"),
        (["empty", "code=os"], "code=os: neither a folder nor the name of a package"),
        (["empty", "code=no-name"], "code=no-name: neither"),
    ):
        status, _, err = command("verify", *words)
        assert (status, err.count("\n")) == (1, 1)
        assert said in err
