"""A worker that stands for one of another machine: `python worker.py MACHINE STOP ARGUMENTS...`.

It sees the claims of others by their age alone, and hangs in the middle of its batch number STOP (0 for never).
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from kvbench.cli.app import main
from kvbench.core import locks
from kvbench.models.infinity.model import InfinityModel


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
    with patch.object(InfinityModel, "generate", hang_at(int(stop), InfinityModel.generate)):
        main()
