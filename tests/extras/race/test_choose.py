"""`task=choose`: the race of the command line, its files, and what it refuses."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
from hydra.errors import InstantiationException

from kvbench.core.config import ConfigError
from kvbench.extras.race import task
from kvbench.extras.race.entrants import Runner, find_entrants, keep_overrides
from kvbench.runs.job import Job
from tests.support.command_line import Command

RACE = ("task=choose", "budget=0.1", "metric=psnr", "prompts.count=64")
MEANS = {"random": 30.0, "swa": 34.0, "streaming_llm": 33.9, "first_scales": 31.0}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, range]]:
    """Blocks that a race draws; their values are random numbers around `MEANS`."""
    blocks: list[tuple[str, range]] = []

    def draw(_: Runner, job: Job, block: range) -> tuple[list[tuple[str, float]], float]:
        method = job.method_name
        blocks.append((method, block))
        prompts = np.random.default_rng(0).normal(0, 3, 64)[block.start : block.stop]
        noise = np.random.default_rng([block.start, *method.encode()]).normal(0, 0.3, len(block))
        values = MEANS[method] + prompts + noise
        named = [(f"prompt {index}", value) for index, value in zip(block, values, strict=True)]
        return named, 5.0 if method == "first_scales" else 1.0

    monkeypatch.setattr(Runner, "draw", draw)
    return blocks


def read_race(folder: Path) -> dict[str, Any]:
    [path] = (folder / "runs" / "races").glob("*/race.json")
    race: dict[str, Any] = json.loads(path.read_text())
    assert (path.parent / "race.png").stat().st_size > 1000
    return race


def test_a_race_draws_blocks_of_methods_that_are_left(
    command: Command, tmp_path: Path, drawn: list[tuple[str, range]]
) -> None:
    status, out, err = command(*RACE, f"methods=[{','.join(MEANS)}]")
    assert status == 0, err
    race = read_race(tmp_path)
    assert drawn[:4] == [(method, range(16)) for method in MEANS]
    assert {method for method, block in drawn if block.start == 16} == {"swa", "streaming_llm"}
    assert race["drawn"] == sum(len(block) for _, block in drawn)
    assert race["grid"] == 4 * 64
    assert [one["method"] for one in race["ranking"]][:2] == ["swa", "streaming_llm"]
    assert "random" in out
    assert "the leader: python run.py budget=0.1 prompts.count=64 method=swa" in out


def test_a_margin_and_a_limit_on_time_end_races_early(
    command: Command, tmp_path: Path, drawn: list[tuple[str, range]]
) -> None:
    status, out, _ = command(
        *RACE, f"methods=[{','.join(MEANS)}]", "margin=1", "choose.seconds=2", "choose.block=8"
    )
    assert status == 0
    race = read_race(tmp_path)
    assert race["state"] == "level"
    assert race["slow"] == {"first_scales": 5.0}
    assert "first_scales left: 5.00 s per sample" in out
    assert "are within 1 of swa" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("metric=null", "metric=null: task=choose compares methods by one metric"),
        ("metric=mse", "metric=mse: no such metric"),
        ("metric=fid_scenes", "metric=fid_scenes"),
        ("methods=[random,random]", "methods=['random', 'random']: name two or more methods"),
        ("methods=random", "methods="),
        ("methods=[random,nosuch]", "methods: nosuch does not fit: method=nosuch: no such choice"),
        ("margin=-1", "margin=-1"),
        ("choose.block=1", "choose.block=1"),
        ("shuffle=-1", "shuffle=-1: must be"),
        ("choose.error=1.5", "choose.error=1.5"),
        ("choose.seconds=0", "choose.seconds=0"),
        ("choose=null", "choose=null"),
        ("method=random", "method: not read by task=choose; set methods=["),
        ("budget=0.0001 methods=[random,swa]", "does not fit"),
        ("methods=[random,scale_groups]", "methods: scale_groups does not fit: has no budget"),
    ],
)
def test_bad_values_get_one_line(
    command: Command, drawn: list[tuple[str, range]], words: str, message: str
) -> None:
    status, _, err = command(*RACE, *words.split())
    assert status == 1
    assert err.splitlines()[-1].startswith("error: ")
    assert message in err
    assert not drawn


def test_prompts_with_like_neighbours_are_drawn_in_random_order(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.txt").write_text(
        "".join(f"a {colour} ring\n" * 2 for colour in ("red", "blue", "yellow") * 8)
    )
    texts: list[list[str]] = []

    def draw(_: Runner, job: Job, block: range) -> tuple[list[tuple[str, float]], float]:
        texts.append([prompt.text for prompt in job.prompts])
        return [(f"{index}", MEANS[job.method_name] + index % 3) for index in block], 1.0

    monkeypatch.setattr(Runner, "draw", draw)
    words = (*RACE[:3], "prompts=file", f"prompts.path={tmp_path / 'mine.txt'}")
    for more, told in (((), True), (("shuffle=3",), False)):
        status, out, err = command(*words, "methods=[random,swa]", *more)
        assert status == 0, err
        assert ("random order (shuffle=0)" in out) == told
        assert f"shuffle={3 if more else 0}" in out.split("the leader: ")[1]
    lines = (tmp_path / "mine.txt").read_text().splitlines()
    assert sorted(texts[0]) == sorted(texts[-1]) == sorted(lines)
    assert texts[0] != lines != texts[-1] != texts[0]
    assert all(one == other for order in texts for one, other in zip(order[::2], order[1::2], strict=True))


def test_what_does_not_fit_a_race_is_named(
    command: Command, tmp_path: Path, drawn: list[tuple[str, range]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of a calibration that are in the race, the reason why no method fits, and whatever a class raises."""
    (tmp_path / "mine.txt").write_text("a red ring\na blue ring\na yellow ring\n" * 8)
    (tmp_path / "more.txt").write_text("a blue ring\na cyan ring\n")
    file = ("prompts=file", f"prompts.path={tmp_path / 'mine.txt'}", "prompts.count=24")
    calibrated = (f"calibrate.prompts={tmp_path / 'more.txt'}", "calibrate.count=2")
    status, _, err = command(*RACE[:3], *file, *calibrated, "methods=[random,swa]")
    assert status == 1
    assert "more.txt: 1 of its prompts are in the race too; leave them out of the file" in err
    listed = {"method": ["full", "random", "swa"], "eval": ["psnr"]}
    monkeypatch.setattr("kvbench.extras.race.entrants.list_choices", listed.__getitem__)
    status, _, err = command(*RACE[:3], "prompts=file", "prompts.path=none.txt")
    assert status == 1
    assert re.search(r"0 methods fit .*; 2 do not: prompts.path=none.txt: cannot be read", err)
    assert not drawn

    def make(_: str) -> NoReturn:
        raise InstantiationException("full_key: method") from RuntimeError("no luck")

    with pytest.raises(ConfigError, match="methods: mine does not fit: RuntimeError: no luck"):
        find_entrants(SimpleNamespace(make=make), ["mine"])  # type: ignore[arg-type]


def test_runs_get_the_settings_of_their_evaluator_only() -> None:
    words = ("task=choose", "eval=[lpips]", "eval.lpips.path=x", "eval.psnr.y=1", "+seed=2", "choose.block=8")
    assert keep_overrides(words, "lpips") == ("eval.lpips.path=x", "+seed=2")


@pytest.mark.slow
def test_runs_of_a_race_are_resumed_and_extended(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("budget=0.1", "prompts.count=10", "batch_size=4")
    more = ("metric=psnr", "choose.block=8", "methods=[random,streaming_llm]", "choose.error=0.2")
    race = ("task=choose", *words, *more)
    rules = task.Rules

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(task, "Rules", stop)
    assert command(*race)[0] != 0
    monkeypatch.setattr(task, "Rules", rules)
    assert command(*race)[0] == 0
    assert [look["after"] for look in read_race(tmp_path)["looks"]] == [8]
    [folder] = (tmp_path / "runs" / "infinity_tiny").glob("random-*")
    assert len(list((folder / "images").iterdir())) == 8
    assert not (folder / "results.json").exists()
    assert (folder / "status").read_text() == "left a race\n"
    before = (folder / "images" / "000000.png").stat().st_mtime_ns
    assert command("method=random", *words, "eval=[psnr]")[0] == 0
    assert (folder / "results.json").is_file()
    assert (folder / "images" / "000000.png").stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_race_to_the_last_prompt_finishes_its_runs(command: Command, tmp_path: Path) -> None:
    """A calibrated method that is prepared for blocks has one folder, which is finished."""
    words = ("budget=0.1", "prompts.count=8", "batch_size=8", "calibrate.count=2", "choose.block=8")
    assert (
        command("task=choose", *words, "metric=psnr", "methods=[random,lukv]", "choose.error=0.001")[0] == 0
    )
    assert len(read_race(tmp_path)["looks"]) == 1
    runs = sorted((tmp_path / "runs" / "infinity_tiny").glob("*/results.json"))
    assert [path.parent.name.split("-")[0] for path in runs] == ["full", "lukv", "random"]
    assert len(list((tmp_path / "runs" / "infinity_tiny").glob("lukv-*"))) == 1
