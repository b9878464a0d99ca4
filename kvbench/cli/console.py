"""The terminal console for tables."""

import os
import sys

from rich.console import Console

from kvbench.core.gpus import AUTO, resolve_device

CONSOLE = Console(width=None if sys.stdout.isatty() else 160)


def show_device(name: str) -> None:
    """Print the device that `device=auto` stands for; nothing if the device is named."""
    if name == AUTO:
        device = resolve_device(name)
        found = f"{'no ' if device == 'cpu' else ''}GPU found"
        CONSOLE.print(f"device: {device} ({'KVBENCH_DEVICE' if os.environ.get('KVBENCH_DEVICE') else found})")
