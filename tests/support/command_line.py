"""Calls of the command line and what they leave behind."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.places import ROOT

Command = Callable[..., tuple[int, str, str]]
"""Runs the command line in this process; gives exit status, standard output and standard error."""


def errors(err: str) -> list[str]:
    """What is left of standard error without progress bars."""
    return [
        line for line in re.split(r"[\n\r]", err) if line.strip() and "it/s" not in line and "|" not in line
    ]


def run_program(folder: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `run.py` to its end in a process of its own with one thread, modules of a folder importable."""
    modules = os.pathsep.join((str(path or folder), os.environ.get("PYTHONPATH", "")))
    return subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": modules},
        capture_output=True,
        text=True,
        timeout=300,
    )
