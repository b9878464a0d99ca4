"""Costs of commands, each a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Cost(NamedTuple):
    """Exit status, CPU seconds, seconds to the end and to the first line (None if no output), peak MiB."""

    status: int
    processor: float
    end: float
    first_line: float | None
    mebibytes: float


def start(program: Path, args: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a Python program in its folder, with one thread; its standard error is dropped."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program), *args]
    return subprocess.Popen(
        command, cwd=program.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def measure(program: Path, args: Sequence[str]) -> Cost:
    """Run a program to its end and return its cost."""
    began = time.monotonic()
    process = start(program, args)
    assert process.stdout is not None
    line = process.stdout.readline()
    first = time.monotonic() - began if line else None
    process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    end = time.monotonic() - began
    return Cost(process.returncode, used.ru_utime + used.ru_stime, end, first, used.ru_maxrss / 1024)
