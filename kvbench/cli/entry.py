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


def main() -> None:
    """Run the command line; Ctrl-C prints one line and ends the process with status 130, without any clean-up.

    The signal counts even if an import, or code that cleans up, replaces its exception by another error.
    """
    received: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> NoReturn:
        received.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        if importlib.util.find_spec("hydra") is None:
            sys.exit(
                "error: kvbench is not installed for this Python; run `make demo`, then `source .venv/bin/activate`"
            )
        repair_streams()
        from kvbench.cli.app import main as run  # slow to import

        run()
    except BaseException as error:
        if isinstance(error, SystemExit) or not (received or isinstance(error, KeyboardInterrupt)):
            raise
        # The signal may have come in the middle of a write, or the stream may be closed.
        with suppress(Exception):
            sys.stdout.flush()
        with suppress(OSError):
            os.write(2, f"{RESUME}\n".encode())
        os._exit(INTERRUPTED)
