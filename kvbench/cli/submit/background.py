"""Sweeps in the background: with `work.wait=false` a command starts itself again and returns at once."""

import subprocess
import sys
from pathlib import Path
from socket import gethostname

from kvbench.cli.console import say

LOG = "background.log"
"""Output of the background process, in the sweep's folder."""


def start_in_background(folder: Path) -> None:
    """Start this command again in its own session, which survives the terminal; print how to watch and stop it."""
    words = [word for word in sys.orig_argv[1:] if not word.startswith("work.wait=")]
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    say(
        f"in the background on {gethostname()}, output in {folder / LOG}; watch: task=status "
        f"work.folder={folder}; stop: kill -INT -- -{process.pid}; resume: run the same command again"
    )
