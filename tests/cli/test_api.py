"""`kvbench.run` and `kvbench.compare`: the runs of the command line, numbers of their samples, errors in one line."""

import doctest
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

import kvbench
from kvbench.cli import api
from kvbench.cli.api import write_overrides
from tests.support.command_line import Command, run_python
from tests.support.results import made_up

SETTINGS: dict[str, Any] = {"budget": 0.1, "prompts": {"count": 4}, "eval": ["psnr", "lpips_scenes"]}
METHODS = ("random", "snapkv", "streaming_llm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("here") / "runs"


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[kvbench.Run]:
    return [kvbench.run(method, runs_dir=folder, **SETTINGS) for method in METHODS]


def test_examples_hold(runs: list[kvbench.Run], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their runs are finished."""
    monkeypatch.chdir(folder.parent)
    outcome = doctest.testmod(api)
    assert outcome.attempted > 8
    assert outcome.failed == 0


def test_a_run_is_that_of_the_command_line(runs: list[kvbench.Run], folder: Path, command: Command) -> None:
    words = ("budget=0.1", "prompts.count=4", "eval=[psnr,lpips_scenes]", f"runs_dir={folder}")
    status, out, _ = command("method=snapkv", *words)
    assert status == 0
    assert f"found finished: {runs[1].folder}" in out
    assert runs[1].results.overrides == ("method=snapkv", *words[:3], "device=cpu")
    few = ("budget=0.1", "prompts.count=1", "eval=none", f"runs_dir={folder}")
    assert command("method=snapkv", "seed=1", *few)[0] == 0
    again = kvbench.run("snapkv", overrides=["prompts.count=9", *few[:3]], runs_dir=folder, seed=1)
    assert again.reused
    assert again.folder != runs[1].folder
    assert again.results.setting("seed") == 1


def test_files_are_read_anew_by_each_call(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "conf" / "method" / "mine.yaml"
    path.parent.mkdir(parents=True)
    found, settings = [], SETTINGS | {"prompts": {"count": 1}, "eval": "none"}
    for seed in (1, 2, 2):
        path.write_text(f"_target_: kvbench.methods.random.Random\nsinks: ${{sinks}}\nseed: {seed}\n")
        words = [f"hydra.searchpath=[file://{path.parents[1]}]"]
        found.append(kvbench.run("mine", overrides=words, runs_dir=folder, **settings))
    assert [one.results.setting("method.seed") for one in found] == [1, 2, 2]
    assert [one.reused for one in found] == [False, False, True]


def test_a_run_has_its_files(runs: list[kvbench.Run]) -> None:
    one = runs[1]
    assert kvbench.Run.read(str(one.folder)) == one
    assert one.reference is not None
    assert one.reference.results.method == "full"
    assert one.reference.reference is None
    assert one.samples["index"].to_list() == [0, 1, 2, 3]
    assert one.samples["psnr"].mean() == pytest.approx(one.metrics["psnr"].value)
    assert one.find_sample(2).is_file()
    assert one.memory.peak_tokens <= one.memory.budget_tokens
    assert one.latency.batch == 4


def test_differences_are_paired_by_sample(runs: list[kvbench.Run]) -> None:
    compared = kvbench.compare(runs, to="random")
    assert [(one.run, one.to) for one in compared.differences] == [(runs[1], runs[0]), (runs[2], runs[0])]
    base = dict(runs[0].samples.select("index", "psnr").rows())
    for one in compared.differences:
        differences = [value - base[index] for index, value in one.run.samples.select("index", "psnr").rows()]
        assert one.metrics["psnr"].value == pytest.approx(sum(differences) / 4)
        low, high = one.metrics["psnr"].interval or (0, 0)
        assert low <= sum(differences) / 4 <= high
        [row] = compared.frame.filter(metric="psnr", method=one.run.results.method).to_dicts()
        assert (row["difference"], row["low"], row["high"]) == (one.metrics["psnr"].value, low, high)
        assert (row["to_method"], row["budget"], row["n"]) == ("random", 0.1, 4)
    folders = [one.folder for one in reversed(runs)]
    for to in (runs[0], runs[0].folder, str(runs[0].folder)):
        assert {one.run.folder for one in kvbench.compare(folders, to=to).differences} == set(folders[:2])


def test_runs_at_other_budgets_have_no_partner(runs: list[kvbench.Run], folder: Path) -> None:
    more = kvbench.run("snapkv", runs_dir=folder, **{**SETTINGS, "budget": 0.3})
    compared = kvbench.compare([*runs[:2], more], to="random")
    assert [one.run for one in compared.differences] == [runs[1]]
    assert [one.run for one in kvbench.compare([more], to=runs[1]).differences] == [more]


def test_figures_are_escaped_in_a_notebook() -> None:
    run = kvbench.Run(Path("<b>[bold]&"), made_up("random", 0.1, {}))
    assert "<b>" not in run._repr_html_()
    assert "<b>[bold]&" in repr(run)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"method": "heatkvv"}, "method=heatkvv: no such choice; did you mean heatkv? choose from"),
        ({"overrides": ["budget=0.1,0.2"]}, "budget=0.1,0.2: several values are a sweep"),
        ({"eval": "none", "task": "plan"}, "task=plan: kvbench.run generates and scores"),
        ({"seed": {1}}, "seed: set is not a value of a setting"),
        ({"method": "snapkv", "budget": 1e-5}, "budget=1e-05: 1 sink scales need 1 of 255 tokens per head"),
        ({"prompts": "file", "prompts.path": "it's, [no].txt"}, "prompts.path=it's, [no].txt: cannot be read"),
    ],
)  # fmt: skip
def test_wrong_settings_are_errors_of_one_line(
    tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(kvbench.UserError) as caught:
        kvbench.run(**{"runs_dir": tmp_path / "runs", **settings})
    assert str(caught.value).startswith(problem)
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None  # no chain in a shell
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("chosen", "to", "problem"),
    [
        (slice(0), "random", "to=random: no run has that method or name; there are none"),
        (slice(3), "full", "to=full: no run has that method or name; there are random, snapkv, streaming_llm"),
        (slice(1), "random", "to=random: no run has a partner"),
        (slice(1), Path("nowhere"), "nowhere: is not the folder of a finished run"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_one_line(
    runs: list[kvbench.Run], chosen: slice, to: Any, problem: str
) -> None:
    with pytest.raises(kvbench.UserError) as caught:
        kvbench.compare(runs[chosen], to=to)
    assert str(caught.value).startswith(problem)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="ascii")),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@given(VALUES)
def test_a_value_is_what_hydra_reads(value: object) -> None:
    [word] = write_overrides({"key": value})
    assert OverridesParser.create().parse_override(word).value() == value


def test_importing_kvbench_imports_nothing_large(tmp_path: Path) -> None:
    large = {"torch", "numpy", "hydra", "omegaconf", "polars"}
    done = run_python(tmp_path, "-c", f"import sys, kvbench; print(*{large} & sys.modules.keys())")
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
