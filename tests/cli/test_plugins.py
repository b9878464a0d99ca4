"""Methods, models, metrics and sweeps of packages outside the repository; `docs/examples/plugin` is one."""

import importlib
import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import hydra
import pytest
from hydra.core.plugins import Plugins

from kvbench.cli.config.messages import check_arguments
from kvbench.cli.config.search_path import PluginSearchPath
from kvbench.cli.tasks.calibrate import list_observers
from kvbench.core.plugins import GROUP, Plugin, find_plugins
from kvbench.methods.ams_kv import KeySimilarity
from kvbench.runs.record.provenance import provenance
from tests.support.command_line import Command, run_program, run_python
from tests.support.places import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "plugin"
Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Makes a distribution `brought 0.1` whose plugin is the given package; what `pip install` would leave behind."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))
    Plugins.instance().register(PluginSearchPath)

    def make(module: str) -> None:
        write(site, "brought-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: brought\nVersion: 0.1\n")
        write(site, "brought-0.1.dist-info/entry_points.txt", f"[{GROUP}]\nbrought = {module}\n")

    yield make
    for name in [name for name in sys.modules if name.startswith("brought")]:
        del sys.modules[name]


def write(folder: Path, name: str, text: str = "") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    importlib.invalidate_caches()  # two files may come within one tick of the clock that imports look at


@pytest.mark.slow
def test_a_package_on_the_path_takes_part_in_a_sweep(tmp_path: Path) -> None:
    few = ("prompts.count=2", "calibrate.count=1", "eval=[psnr,mae]", "budget=0.1")
    words = ("-m", "sweeps=baseline", "hydra.searchpath=[pkg://kvbench_example.conf]", *few)
    done = run_program(tmp_path, *words, path=EXAMPLE)
    assert done.returncode == 0, done.stderr
    metrics = {}
    for method in ("random_tokens", "heatkv"):
        [path] = (tmp_path / "runs" / "infinity_tiny_guided").glob(f"{method}-0.1-*/results.json")
        results = json.loads(path.read_text())
        assert 0 < results["memory"]["peak_tokens"] <= results["memory"]["budget_tokens"]
        metrics[method] = results["metrics"]["mae"]["value"]
        assert f"{method} " in done.stdout[done.stdout.rindex("± half") :]
    assert metrics["random_tokens"] != metrics["heatkv"]
    assert all(0 < value < 50 for value in metrics.values())


@pytest.mark.slow
def test_installed_plugins(install: Install, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    declared = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    install(declared["example"])
    monkeypatch.syspath_prepend(str(EXAMPLE))
    assert find_plugins() == [Plugin("brought", "0.1", "kvbench_example.conf")]
    _, plans, _ = command("-m", "task=plan", "method=glob(random_t*)", "budget=0.1,0.2")
    assert plans.count("tokens one sequence holds") == 2
    assert command("list", "methods", "random_tokens")[1].count("random_tokens ") == 1
    assert "mae" in command("list", "metrics", "mae")[1]
    problem = check_arguments(["method=randomly"])
    assert problem is not None
    assert "random_tokens" in problem
    assert provenance("cpu", None)["versions"]["brought"] == "0.1"  # type: ignore[index]


@pytest.mark.slow
def test_conformance_tests_cover_installed_plugins(install: Install, tmp_path: Path) -> None:
    install("kvbench_example.conf")
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "random_tokens and small")
    path = f"{tmp_path / 'site'}:{EXAMPLE}"
    done = run_python(ROOT, *words, "tests/methods/test_every_method.py", PYTHONPATH=path)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.rpartition(" passed")[0].rpartition("\n")[2]) > 5


@pytest.mark.slow
def test_calibrations_of_plugins_are_made_with_all_others(install: Install, tmp_path: Path) -> None:
    install("brought_conf")
    write(tmp_path / "site", "brought_conf/__init__.py")
    text = "defaults: [ams_kv_fixed, _self_]\nmetric: neg_l2\n"
    write(tmp_path / "site", "brought_conf/method/by_distance.yaml", text)
    with hydra.initialize_config_module("kvbench.conf", version_base="1.3"):
        observers = list_observers(hydra.compose("config"))
    assert KeySimilarity(metric="neg_l2") in observers
    assert KeySimilarity(metric="neg_mse") in observers
    assert len({repr(observer) for observer in observers}) == len(observers)


BROKEN = {
    "brought.nowhere": "cannot be imported (ModuleNotFoundError: No module named 'brought.nowhere'); repair the",
    "brought.raises": "cannot be imported (RuntimeError: not today); repair the package or uninstall it",
    "brought.plain": "has no __init__.py; repair the package or uninstall it",
    "brought.again": "method=heatkv of pkg://brought.again exists already in pkg://kvbench.conf; rename the file",
}


@pytest.mark.parametrize("module", BROKEN)
def test_a_broken_plugin_is_one_line(install: Install, tmp_path: Path, module: str) -> None:
    install(module)
    site = tmp_path / "site" / "brought"
    write(site, "__init__.py")
    write(site, "raises/__init__.py", "raise RuntimeError('not today')\n")
    write(site, "plain/method/mine.yaml", "_target_: brought.Mine\n")
    write(site, "again/__init__.py")
    write(site, "again/method/heatkv.yaml", "_target_: brought.Mine\n")
    problem = check_arguments(["method=heatkv"])
    assert problem is not None
    assert problem.startswith("plugin brought 0.1: ")
    assert BROKEN[module] in problem
    assert "\n" not in problem


def test_a_method_that_breaks_on_import_is_one_line(install: Install, tmp_path: Path) -> None:
    install("brought_conf")
    write(tmp_path / "site", "brought_conf/__init__.py")
    write(tmp_path / "site", "brought_conf/method/mine.yaml", "_target_: brought_mine.Mine\n")
    write(tmp_path / "site", "brought_mine.py", "def broken(:\n")
    problem = check_arguments(["method=mine"])
    assert problem is not None
    assert problem.startswith("method._target_=brought_mine.Mine: cannot be imported (SyntaxError: ")
    assert "brought_mine.py, line 1" in problem
