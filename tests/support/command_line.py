"""Calls of the command line and what they leave behind."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.places import ROOT

Command = Callable[..., tuple[int, str, str]]
"""Runs the command line in this process; gives exit status, standard output and standard error."""

RUN = str(ROOT / "run.py")


def errors(err: str) -> list[str]:
    """What is left of standard error without progress bars."""
    return [
        line for line in re.split(r"[\n\r]", err) if line.strip() and "it/s" not in line and "|" not in line
    ]


def run_program(folder: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `run.py` to its end in a process of its own, modules of a folder importable."""
    modules = os.pathsep.join((str(path or folder), os.environ.get("PYTHONPATH", "")))
    return run_python(folder, RUN, *arguments, PYTHONPATH=modules)


def run_python(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python to its end in a folder, with one thread; `variables` change its environment."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables
    options = {"cwd": folder, "env": env, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *words], timeout=600, **options)


def start_python(folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """Start Python in a folder, with one thread; both of its outputs come as one."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *words], cwd=folder, env=env, **outputs)


def start_two(folder: Path, *words: str) -> list[subprocess.Popen[str]]:
    """Start a Python program twice as torchrun does, without its watching them."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_port()), "WORLD_SIZE": "2"}
    return [start_python(folder, *words, RANK=rank, LOCAL_RANK=rank, **shared) for rank in "01"]


def find_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
