"""`show` answers one prompt under a method and under the full cache, and puts the answers side by side."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import kvbench
from kvbench.cli.tasks.show import split_prompt
from kvbench.core.config import ConfigError
from kvbench.prompts.files import PromptFile
from kvbench.prompts.texts import Texts
from kvbench.prompts.typed import Typed, quote
from kvbench.runs import prepare
from tests.support.command_line import Command

CAPTION = "a red circle above a blue square"
WRITER = ("model=reasoner_tiny", "model.weights=random", "model.max_tokens=40", "method=tova", "budget=12")
"""A model that takes any prompt and writes words."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> kvbench.Run:
    """A run of the caption in a file."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "one.txt").write_text(f"{CAPTION}\n")
    settings = {
        "runs_dir": folder / "runs",
        "prompts.path": folder / "one.txt",
        "budget": 0.1,
        "eval": "psnr",
    }
    return kvbench.run("snapkv", prompts="file", **settings)


def test_an_image_is_drawn_as_in_a_run_of_its_prompt(command: Command, plain: kvbench.Run) -> None:
    status, out, err = command("show", CAPTION, "method=snapkv", "budget=0.1", "runs_dir=own")
    assert status == 0, err
    assert "skipped" not in out
    [sheet] = [Path(line.removeprefix("image: ")) for line in out.splitlines() if "image: " in line]
    assert sheet.parent.parent == Path("own/shown/infinity_tiny")
    shown = kvbench.Run.read(sheet.parent)
    assert shown.results.overrides is None  # no overrides compose its prompt
    assert shown.folder.name == plain.folder.name  # of the same identity: seed, noise, method and prompt
    assert shown.find_sample(0).read_bytes() == plain.find_sample(0).read_bytes()
    assert shown.metrics["psnr"] == plain.metrics["psnr"]
    picture = np.array(Image.open(sheet))
    for one, left in ((shown.reference, 8), (shown, 8 + 384 + 2)):
        assert one is not None
        drawn = picture[-8 - 384 : -8, left : left + 384]
        assert (drawn[::4, ::4] == np.array(Image.open(one.find_sample(0)))).all()


def test_a_calibration_of_runs_is_used_again(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("method=heatkv", "calibrate.count=2")
    assert command("task=calibrate", *words)[0] == 0
    [made] = Path("runs").rglob("*.safetensors")
    monkeypatch.delattr(prepare, "calibrate")
    assert command("show", CAPTION, "budget=0.1", *words)[0] == 0
    assert {path.name for path in Path("runs").rglob("*.safetensors")} == {made.name}
    assert kvbench.runs_df("runs").is_empty()  # what is shown is in no table of runs


def test_a_prompt_is_calibrated_on_others_of_its_set(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("a\nb\nc\n")
    for of, expected in ((PromptFile(str(tmp_path / "my.txt")), ["a", "c"]), (Texts(), [])):
        prompt = Typed(quote("b"), of)
        assert [one.text for one in prompt.load()] == ["b"]
        assert [one.text for one in prompt.load_others(2, seed=0)] == expected


def test_a_text_stands_beside_the_full_caches(command: Command) -> None:
    prompt = r"~what is ${seed}, \${x} or " + 300 * "long "
    status, out, err = command("show", prompt, "model.prompt_tokens=400", *WRITER)
    assert status == 0, err
    [folder] = Path("runs/shown/reasoner_tiny").glob("tova-12-*")
    run = kvbench.Run.read(folder)
    assert json.loads((folder / "samples.jsonl").read_text())["prompt"] == prompt
    assert run.reference is not None
    texts = [one.find_sample(0).read_text() for one in (run.reference, run)]
    for text in texts:
        assert all(word in out for word in text.split())
    assert "full cache" in out
    assert ("the same text" in out) == (texts[0] == texts[1]) == (run.metrics["same_text"].value == 1)
    again = command("show", prompt, "model.prompt_tokens=400", *WRITER)[1]
    assert f"found finished: {folder}" in again


def test_the_first_texts_of_a_file_are_printed_after_its_run(command: Command) -> None:
    Path("my.txt").write_text("".join(f"prompt {number}\n" for number in range(6)))
    status, out, err = command(*WRITER, "prompts=file", "prompts.path=my.txt")
    assert status == 0, err
    assert "skipped" not in out
    assert [f"prompt {number}'" in out for number in range(6)] == [True] * 4 + [False] * 2
    assert "2 more texts: runs/reasoner_tiny/tova-12-" in out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "show: there is no prompt beside settings; kvbench show"),
        (["a", "red", "circle", "method=h2o"], "show: put the prompt in quotes: 'a red circle'"),
        ([CAPTION], "show: an answer of the full cache is shown in any case; name a method beside it, such as"),
        ([CAPTION, "method=h2o", "-m"], "show: -m is not an option"),
        ([CAPTION, "method=h2o", "budget=0.1,0.2"], "show: budget=0.1,0.2: several values are a sweep; give one"),
        ([CAPTION, "method=h2o", "task=plan"], "show: task has no effect on one prompt; leave it out"),
        (["a dog", "method=h2o", "budget=0.1"], "prompt 'a dog': the scenes vocabulary has no word 'dog'"),
        (["red", "model=var_tiny", "method=h2o"], "prompt 'red': var_tiny needs a class number from 0 to 29"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_refused_in_one_line(
    command: Command, words: list[str], problem: str
) -> None:
    status, _, err = command("show", *words)
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith(f"error: {problem}")
    assert not Path("runs").exists()


def test_a_prompt_is_any_word_that_sets_no_key() -> None:
    settings = ["method=h2o", "+protect.leading=4", "method@method.base=rkv"]
    for prompt in ("7", "- a list", "solve x = 2", "What is 1+1=?"):
        assert split_prompt([*settings, prompt]) == (prompt, settings)
    with pytest.raises(ConfigError, match="there is no prompt"):
        split_prompt(["x=2"])
