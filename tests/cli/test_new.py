"""`new method` and `new package` write files that run at once, with one test to fill in; `smoke=true` runs them."""

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins

from kvbench.cli.config.compose import compose_job, hydra_of_kvbench
from kvbench.cli.config.search_path import PluginSearchPath
from tests.support.command_line import Command
from tests.support.places import ROOT


@pytest.fixture(autouse=True)
def _forget_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(tmp_path / "sparse_lines"))
    Plugins.instance().register(PluginSearchPath)
    yield
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("sparse_lines", "test_sparse_lines")
    ]:
        del sys.modules[name]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "kvbench/methods").mkdir(parents=True)
    shutil.copy(ROOT / "run.py", tmp_path)
    return tmp_path


def list_written(out: str) -> list[str]:
    return [line.removeprefix("wrote: ") for line in out.splitlines() if line.startswith("wrote: ")]


def test_a_new_package_runs_and_has_one_test_to_fill_in(command: Command, tmp_path: Path) -> None:
    status, out, err = command("new", "package", "sparse_lines")
    assert (status, err) == (0, "")
    written = list_written(out)
    assert sorted(written) == sorted(
        str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.*") if p.is_file()
    )
    assert not any("your" in Path(name).read_text().lower() for name in written)
    [following] = [line for line in out.splitlines() if line.startswith("next: ")]
    assert following.startswith(
        "next: pip install -e sparse_lines; kvbench method=sparse_lines budget=0.1 smoke=true"
    )
    importlib.invalidate_caches()
    sys.path.append("sparse_lines/tests")
    try:
        tests = importlib.import_module("test_sparse_lines")
    finally:
        sys.path.remove("sparse_lines/tests")
    tests.test_the_budget_holds()
    with pytest.raises(AssertionError):
        tests.test_it_keeps_the_right_tokens()
    words = ("method=sparse_lines", "budget=0.1", "smoke=true", "hydra.searchpath=[pkg://sparse_lines.conf]")
    status, out, err = command(*words)
    assert status == 0, err
    [path] = Path("runs/infinity_tiny").glob("sparse_lines-0.1-*/results.json")
    results = json.loads(path.read_text())
    assert results["n"] == 2
    assert set(results["evaluated"]) == {"psnr"}
    method = {"_target_": "sparse_lines.sparse_lines.SparseLines", "power": 1.0, "sinks": 1, "leading": 0}
    assert results["config"]["method"] == method


def test_a_method_is_added_to_the_package_whose_folder_this_is(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("new", "package", "sparse_lines")[0] == 0
    monkeypatch.chdir(tmp_path / "sparse_lines")
    assert command("new", "method", "dense_lines")[0] == 0
    file = Path("sparse_lines/conf/method/dense_lines.yaml")
    assert "_target_: sparse_lines.dense_lines.DenseLines" in file.read_text()


def test_a_method_in_a_checkout(command: Command, checkout: Path) -> None:
    status, out, err = command("new", "method", "sparse_lines")
    assert (status, err) == (0, "")
    parts = ("kvbench/methods/{}.py", "conf/method/{}.yaml", "tests/methods/test_{}.py")
    names = [part.format("sparse_lines") for part in parts]
    assert list_written(out) == names
    assert "_target_: kvbench.methods.sparse_lines.SparseLines" in Path(names[1]).read_text()
    before = [(checkout / name).read_bytes() for name in names]
    (checkout / names[0]).unlink()
    status, _, err = command("new", "method", "sparse_lines")
    assert status == 1
    assert "conf/method/sparse_lines.yaml exists; choose another name or delete it" in err
    assert not (checkout / names[0]).exists()  # all files or none
    assert (checkout / names[2]).read_bytes() == before[2]


@pytest.mark.parametrize(
    ("choices", "metric"),
    [("model=var_tiny prompts=imagenet", "psnr"), ("model=reasoner_tiny prompts=math_tiny", "text_length")],
)
def test_a_smoke_run_has_two_prompts_and_one_metric(choices: str, metric: str) -> None:
    with hydra_of_kvbench():
        cfg, _ = compose_job([*choices.split(), "smoke=true", "prompts.count=7", "eval=none"])
        plain, _ = compose_job(choices.split())
    assert (cfg.prompts.count, list(cfg.eval)) == (2, [metric])
    for key in plain.keys() - {"prompts", "eval", "smoke"}:
        assert cfg[key] == plain[key]
    assert cfg.keys() == plain.keys()
