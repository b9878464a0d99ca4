"""The command line under the newest Hydra of the registry, release candidates included."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

INSTALL = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--pre", "--target")
COMPOSE = """
from pathlib import Path
import hydra
from hydra.utils import instantiate
from omegaconf import OmegaConf

print(hydra.__version__)
folder = Path("conf")
with hydra.initialize_config_module("kvbench.conf", version_base="1.3"):
    for group in ("model", "method", "prompts", "eval", "storage"):
        for file in sorted((folder / group).rglob("*.yaml")):
            choice = file.relative_to(folder / group).with_suffix("")
            cfg = hydra.compose("config", overrides=[f"{group}={choice}"])
            OmegaConf.to_container(cfg, resolve=True, throw_on_missing=False)
            if group == "method":
                instantiate(cfg.method)
"""


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment whose Hydra is the newest that the registry has."""
    target = tmp_path_factory.mktemp("hydra")
    done = subprocess.run(
        [sys.executable, *INSTALL, str(target), "hydra-core"], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["pip failed"]
        pytest.skip(f"the newest hydra-core cannot be installed here: {lines[-1]}")
    return {**os.environ, "PYTHONPATH": str(target)}


def call(newest: dict[str, str], folder: Path, *words: str) -> str:
    """Standard output of Python with the newest Hydra; the test fails where the program does."""
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=newest, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_choice_composes(newest: dict[str, str], root: Path) -> None:
    version = call(newest, root, "-c", COMPOSE).split()[0]
    assert tuple(map(int, version.split(".")[:2])) >= (1, 3)


def test_a_sweep_runs(newest: dict[str, str], root: Path, tmp_path: Path) -> None:
    words = ("-m", "method=random,heatkv", "budget=0.1", "prompts.count=1", "calibrate.count=1", "eval=none")
    call(newest, tmp_path, str(root / "run.py"), *words)
    runs = sorted(path.parent.name for path in tmp_path.glob("runs/*/*/results.json"))
    assert [name.split("-")[0] for name in runs] == ["full", "heatkv", "random"]
