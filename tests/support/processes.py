"""Starting several processes that talk to each other, for tests."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start_together(program: list[str], count: int, folder: Path) -> list[subprocess.Popen[str]]:
    """Start a Python program `count` times as torchrun does, without its watching them."""
    port = find_port()
    shared: Mapping[str, str] = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
    }
    return [
        subprocess.Popen(
            [sys.executable, *program],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
