"""Old names of modules: one line that names the new one, wherever the name is written."""

import importlib
import importlib.util
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins

from kvbench.cli.config.messages import check_arguments
from kvbench.cli.config.search_path import PluginSearchPath
from kvbench.core.moved import MOVED

BASE = "kvbench.methods.base moved to kvbench.methods.shared.base"


@pytest.mark.parametrize("old", sorted(MOVED))
def test_new_names_exist_and_old_ones_name_them(old: str) -> None:
    new = MOVED[old].partition(",")[0]
    assert importlib.util.find_spec(f"kvbench.{new}") is not None
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module(f"kvbench.{old}")
    assert str(error.value) == f"kvbench.{old} moved to kvbench.{MOVED[old]}"


def test_a_module_imported_from_its_package_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match=BASE):
        exec("from kvbench.methods import base")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'kvbench\.methods\.nothing'$"):
        importlib.import_module("kvbench.methods.nothing")


@pytest.mark.parametrize(
    ("key", "target", "line"),
    [
        ("method", "kvbench.methods.base.Method", BASE),
        ("model.sources.transformer", "kvbench.models.weights.File", "to kvbench.models.files.weights"),
    ],
)
def test_a_target_is_one_line(key: str, target: str, line: str) -> None:
    problem = check_arguments([f"{key}._target_={target}"])
    assert problem is not None
    assert problem.startswith(f"{key}._target_={target}: cannot be imported (ModuleNotFoundError: kvbench.")
    assert line in problem
    assert "\n" not in problem


@pytest.mark.parametrize("target", ["kvbench.methods.base.Method", "old_plugin.Mine"])
def test_a_plugin_of_old_names_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    Plugins.instance().register(PluginSearchPath)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "old_plugin.py").write_text("from kvbench.methods.base import Method\n")
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").write_text(f"_target_: {target}\n")
    named = f"hydra.searchpath=[file://{tmp_path}]"
    monkeypatch.setattr("sys.argv", ["run.py", named])
    problem = check_arguments([named, "method=mine"])
    assert problem is not None
    assert problem.startswith(f"method._target_={target}: cannot be imported (ModuleNotFoundError: {BASE})")
    assert "\n" not in problem
