"""`kvbench verify`: a run of a class that is not kvbench's, and words that are refused."""

import json
import sys
from pathlib import Path

import pytest

from kvbench.core.config import ConfigError
from kvbench.extras.share.verify.command import verify
from kvbench.extras.share.verify.recorded import RecordedJobs, check_targets
from kvbench.runs.record.results import Evaluated
from tests.support.command_line import Command
from tests.support.results import made_up

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


@pytest.mark.slow
def test_foreign_code_and_prompts_are_read_only_if_they_are_named_and_never_quoted(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker, own, before = tmp_path / "was_run", tmp_path / "own" / "mine.txt", list(sys.path)
    for path, text in ((own, "a red ring\na cyan cross\n"), (tmp_path / "code" / "own_method.py", OWN)):
        path.parent.mkdir()
        path.write_text(text.format(marker=str(marker)))
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    words = ("method=streaming_llm", "method._target_=own_method.Mine", "prompts=file", f"prompts.path={own}")
    status, _, err = command(*words, "budget=0.1", "smoke=true")
    assert status == 0, err
    [run] = Path("runs/infinity_tiny").glob("streaming_llm-*")
    marker.unlink()
    verify_run = ("verify", str(run), "samples=1", "out=a.json")
    code, weights = f"code={run}/source", f"weights={own.parent}"

    def check(*more: str) -> tuple[int, str]:
        sys.modules.pop("own_method", None)
        monkeypatch.setattr(sys, "path", list(before))
        status, out, err = command(*verify_run, *more)
        return status, out + err

    status, out = check(weights)
    assert (status, marker.exists()) == (1, False)
    assert "not verifiable here" in out
    assert "own_method.Mine: code that is not kvbench's is not run" in out
    status, out = check(code)
    assert status == 1
    assert f"prompts.path={own}: is not read; put it into a folder and add weights=FOLDER" in out
    status, out = check(code, weights)
    assert (status, marker.exists()) == (0, True), out
    outcome = json.loads(Path("a.json").read_text())
    assert [one["status"] for one in outcome["runs"]] == ["verified", "verified"]
    assert "**Verified**" in outcome["badge"]
    own.write_text("my private words\n" * 2)
    status, out = check(code, weights)
    assert status == 1
    assert "prompts.path: the run cannot be made with the file of weights=FOLDER (" in out
    assert "private" not in out + Path("a.json").read_text()
    own.write_text("a red ring\na cyan cross\n")
    source = run / "source" / "own_method.py"
    source.write_text(source.read_text().replace("revision = 0", "revision = 0\n    more = 1"))
    status, out = check(code, weights)
    assert status == 1
    assert "code: differs here from the run's: own_method" in out
    sys.modules.pop("own_method", None)


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
        with pytest.raises(ConfigError, match=r"is not run|No module named"):
            check_targets(node, "method", ["os", "subprocess", "hydra", "yaml"])
    if target != "kvbench.scenes.detector.detect":
        getter = {"_target_": "hydra.utils.get_method", "path": target, "_partial_": True}
        with pytest.raises(ConfigError, match=r"is not run|No module named"):
            check_targets(getter, "eval", ["os"])


def test_classes_of_kvbench_and_its_functions_that_are_not_called_pass() -> None:
    check_targets({"_target_": FULL}, "method", [])
    getter = {"_target_": "hydra.utils.get_method", "path": "kvbench.scenes.detector.detect"}
    check_targets(getter, "eval", [])
    by_place = {"_target_": "kvbench.prompts.files.PromptFile", "_args_": ["a.txt"]}
    for node, group, told in (
        ({"_target_": f"{FULL}er"}, "method", "cannot be imported"),
        ({"path": "${oc.env:HOME}"}, "model", "interpolation"),
        ("{_target_: os.getcwd}", "prompts", "prompts: must be a group of keys"),
        (["a"], "prompts", "prompts: must be a group of keys"),
        (by_place, "prompts", r"prompts\._args_: a stored"),
    ):
        with pytest.raises(ConfigError, match=told):
            check_targets(node, group, [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a", "b"], "2 folders given"),
        (["a", "samples="], "samples=: no such key, no value"),
        (["a", "seed=1", "seed=2"], "seed=2: .* given twice"),
        (["a", "samples=0"], "samples=0: must be a whole number from 1"),
        (["a", "seed=-1"], "seed=-1: must be a whole number from 0"),
        (["a", "by= "], "by=' ': must be a name of 1 to 80"),
        (["a", "weights=nowhere"], "weights=nowhere: no such folder"),
        (["a", "out=x.txt"], "must be a file name that ends with .json"),
    ],
)
def test_wrong_words_end_in_one_line(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        verify(words)


def test_a_record_of_many_metrics_ends_in_one_line(tmp_path: Path) -> None:
    one = Evaluated(status="ok", protocol="uint8", settings={})
    many = made_up("h2o", 0.1, {}, evaluated={f"psnr{number}": one for number in range(20_000)})
    with pytest.raises(ConfigError, match=r"^results.json: names 20000 evaluators, 64 at most are computed"):
        RecordedJobs(tmp_path)(many)


def test_folders_without_runs_end_in_one_line(command: Command, tmp_path: Path) -> None:
    for name in ("empty", "a.json"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    for words, said in (
        (["nowhere"], "verify: nowhere: no such folder"),
        (["empty"], "verify: empty: holds no run"),
        (["empty", "code=os"], "code=os: neither a folder nor the name of a package"),
        (["empty", "code=own_method,"], "code=: neither"),
        (["empty", "out=empty/../empty"], "must be a file name that ends with .json"),
        (["empty", "out=file/x.json"], "out=file/x.json: cannot be written (file is not a folder)"),
        (["empty", "out=a.json"], "out=a.json: cannot be written (it is a folder)"),
    ):
        status, _, err = command("verify", *words)
        assert (status, err.count("\n")) == (1, 1)
        assert said in err
