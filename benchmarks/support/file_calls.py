"""System calls on the files of a folder, counted by strace (Linux)."""

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

REMEDY = "strace is missing: install it to count calls (apt-get install strace)"
MARK = "/section-of-the-trace/"
"""Path that no file has: looking for it begins a section."""
LOCAL = {"fcntl", "ioctl", "lseek"}
"""Calls that no file system is asked for."""


def begin_section(name: str) -> None:
    """Have the calls that follow counted under a name, if this process is traced."""
    Path(MARK, name).exists()


def can_count() -> bool:
    """Return whether calls can be counted here."""
    return shutil.which("strace") is not None


def count_calls(command: Sequence[str], folder: Path, log: Path) -> dict[str, Counter[str]]:
    """Run a command and return how often it and its children called the system for files of a folder.

    Args:
        command: words of the command; it calls `begin_section`.
        folder: what lies below it counts, by path or as an open file.
        log: file for the trace, outside of the folder.

    Returns:
        Counts by the call's name, by section.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    tracing = ["strace", "-f", "-y", "-s", "0", "-e", "trace=%file,%desc", "-o", str(log)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*tracing, *command], check=True, env=environment, stdout=subprocess.DEVNULL)
    return read_trace(log.read_text(errors="replace"), str(folder))


def read_trace(text: str, folder: str) -> dict[str, Counter[str]]:
    """Return how often each call concerned a folder, by section, from the output of `strace -f -y`."""
    sections: dict[str, Counter[str]] = {}
    section = ""
    for line in text.splitlines():
        if (mark := re.search(f'"{MARK}([^"]*)"', line)) is not None:
            section = mark[1]
        elif (
            folder in line and (call := re.match(r"\d+ +(\w+)\(", line)) is not None and call[1] not in LOCAL
        ):
            sections.setdefault(section, Counter())[call[1]] += 1
    return sections
