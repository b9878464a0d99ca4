"""A worker that stands for one of another machine: it sees the claims of others by their age alone."""

import sys
import time
from collections.abc import Callable, Sequence
from unittest.mock import patch

from kvbench.cli.app import main
from kvbench.core import locks
from kvbench.models.infinity.model import InfinityModel


def work_as(machine: str, stop: int, arguments: Sequence[str]) -> None:
    """Run the command line as a machine, and hang in the middle of the batch number `stop` (0 for never)."""
    locks.MACHINE = machine
    sys.argv = ["run.py", *arguments]
    with patch.object(InfinityModel, "generate", hang_at(stop, InfinityModel.generate)):
        main()


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
