"""SIGTERM of a worker, which ends between two blocks: schedulers send it some time before they kill."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def deferring_sigterm(grace: float) -> Iterator[threading.Event]:
    """Have SIGTERM set an event instead of ending the process.

    A launcher that handles SIGTERM by itself keeps its handler, and the event is never set.

    Args:
        grace: seconds after the signal until the process is interrupted as by Ctrl-C, which also releases its claims.

    Yields:
        The event.
    """
    asked = threading.Event()

    def interrupt(_: int, __: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    def ask(number: int, frame: FrameType | None) -> None:
        asked.set()
        if grace == 0:
            interrupt(number, frame)
        signal.setitimer(signal.ITIMER_REAL, grace)

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield asked
        return
    alarm = signal.signal(signal.SIGALRM, interrupt)
    signal.signal(signal.SIGTERM, ask)
    try:
        yield asked
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, alarm)
