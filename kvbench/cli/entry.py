"""Start of the process: standard streams and Ctrl-C, before the modules of the command line are imported."""

import importlib.util
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from kvbench.cli.streams import repair_streams
from kvbench.cli.workers.sigterm import INTERRUPTED, RESUME

IMPORTING = "importlib._bootstrap"
"""Module whose frames are on the stack while a module is imported."""


def main() -> None:
    """Run the command line; Ctrl-C prints one line and ends the process with status 130."""
    interrupted = Interrupts()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)
    try:
        if importlib.util.find_spec("hydra") is None:
            sys.exit(
                "error: kvbench is not installed for this Python; run `make demo`, then `source .venv/bin/activate`"
            )
        repair_streams()
        from kvbench.cli.app import main as run  # slow to import

        run()
    except BaseException as error:
        if isinstance(error, SystemExit) or not (
            interrupted.received or isinstance(error, KeyboardInterrupt)
        ):
            raise
        end_interrupted()


class Interrupts:
    """Handler of SIGINT that ends the process during an import and raises KeyboardInterrupt otherwise.

    An exception in an import can be lost in a callback, or be reported as an ImportError by an extension module.

    Attributes:
        received: whether the signal arrived; clean-up code may have replaced the interrupt by another error.
    """

    received = False

    def __call__(self, _: int, frame: FrameType | None) -> None:
        """Handle the signal in a stack of frames."""
        self.received = True
        while frame is not None:
            if frame.f_globals.get("__name__") == IMPORTING:
                end_interrupted()
            frame = frame.f_back
        raise KeyboardInterrupt


def end_interrupted() -> NoReturn:
    """Print the line of an interrupted command and end the process without any clean-up."""
    with suppress(Exception):  # the signal may have come in the middle of a write, or the stream be closed
        sys.stdout.flush()
    with suppress(OSError):
        os.write(2, f"{RESUME}\n".encode())
    os._exit(INTERRUPTED)
