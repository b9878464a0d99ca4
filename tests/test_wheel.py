"""The wheel holds the whole program, which then runs where there is no checkout."""

import configparser
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.command_line import run_python

PARTS = {"kvbench": "kvbench", "kernels": "kvbench/kernels", "eval": "kvbench/eval", "conf": "kvbench/conf"}
"""Folders of the checkout and where the wheel has them."""
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, where no earlier build can leave a file behind."""
    pytest.importorskip("setuptools", "77")
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for name in PARTS:
        shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "THIRD_PARTY.md"):
        shutil.copy(root / name, copy)
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=copy, capture_output=True, check=True)
    [built] = out.glob("kvbench-*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_every_file(root: Path, wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    there = {
        f"{inside}/{path.relative_to(root / part).as_posix()}"
        for part, inside in PARTS.items()
        for path in (root / part).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == there
    assert "kvbench/assets/infinity_tiny/transformer.safetensors" in held


@pytest.mark.slow
def test_the_wheel_runs_in_an_empty_directory(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    scripts = configparser.ConfigParser()
    scripts.read(next(site.glob("*.dist-info/entry_points.txt")))
    module, function = scripts["console_scripts"]["kvbench"].split(":")
    start = f"import {module}; assert {module}.__file__.startswith({str(site)!r}); {module}.{function}()"
    sweep = ["-m", "sweeps=budget", "method=streaming_llm", "budget=0.1", "prompts.count=1", "eval=psnr"]
    done = run_python(empty, "-c", start, *sweep, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    [results] = empty.glob("runs/infinity_tiny/streaming_llm-0.1-*/results.json")
    assert json.loads(results.read_text())["metrics"]["psnr"]["value"] > 20
