"""A worker that stands for one of another machine: `python worker.py MACHINE STOP ARGUMENTS...`.

The folder in which it starts is for it one of a network file system, so that it sees the claims of others by their age
alone. It hangs in the middle of its batch number STOP (0 for never).
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from network_files import network_files

from kvbench.cli.app import main
from kvbench.core import claims as locks
from kvbench.models.infinity.model import InfinityModel

CACHED = 1.0
"""Seconds for which it believes what it knows of a file."""


def hang_at(stop: int, generate: Callable[..., object]) -> Callable[..., object]:
    batches = 0

    def generating(*arguments: object) -> object:
        nonlocal batches
        batches += 1
        if batches == stop:
            print("hangs", flush=True)
            time.sleep(600)
        return generate(*arguments)

    return generating


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, locks.MACHINE, stop = sys.argv[:3]
    del sys.argv[1:3]
    with (
        network_files(Path.cwd(), CACHED) as client,
        patch.object(InfinityModel, "generate", hang_at(int(stop), InfinityModel.generate)),
    ):
        try:
            main()
        finally:
            print(f"{client.late} answers of the file system were late")
