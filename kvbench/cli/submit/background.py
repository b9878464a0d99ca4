"""Sweeps in the background: with `work.wait=false` a command starts itself again and returns at once."""

import subprocess
import sys
from pathlib import Path
from socket import gethostname

from kvbench.cli.console import CONSOLE

LOG = "background.log"
"""Output of the background process, in the sweep's folder."""


def leave(folder: Path) -> None:
    """Start this command again, waiting, in a session of its own; print a line that says how to look and how to stop.

    The process goes on when the terminal closes.

    Args:
        folder: the sweep's.
    """
    words = [word for word in sys.orig_argv[1:] if not word.startswith("work.wait=")]
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    line = (
        f"in the background on {gethostname()}, output in {folder / LOG}; task=status work.folder={folder} shows how "
        f"far it is, kill -INT -- -{process.pid} stops it, the same command goes on with it"
    )
    CONSOLE.print(line, highlight=False, markup=False, soft_wrap=True)
