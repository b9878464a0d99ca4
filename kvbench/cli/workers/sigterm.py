"""Handlers of SIGTERM: a worker ends between two blocks, a waiting command ends with its processes."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

TERMINATED = 128 + signal.SIGTERM
"""Exit status after SIGTERM, as in shells."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C, as in shells."""
RESUME = "interrupted; run the same command again to resume"
"""Line that a command prints when Ctrl-C or SIGTERM ends it."""


class Terminated(KeyboardInterrupt):
    """Exception for SIGTERM, raised for code that handles Ctrl-C."""


@contextmanager
def interrupting_on_sigterm() -> Iterator[None]:
    """Have SIGTERM interrupt the process as Ctrl-C does, so that joblib ends its processes.

    Raises:
        Terminated: the process received SIGTERM.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(_: int, __: FrameType | None) -> NoReturn:
    raise Terminated


@contextmanager
def deferring_sigterm(grace: float) -> Iterator[threading.Event]:
    """Have SIGTERM set an event instead of ending the process.

    If a launcher has its own handler, it is kept and the event is never set; submitit's handler, which only logs the
    signal, is replaced and restored.

    Args:
        grace: seconds from the signal to an interrupt as by Ctrl-C, which also releases claims.

    Yields:
        The event.
    """
    received = threading.Event()

    def interrupt(_: int, __: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    def handle(number: int, frame: FrameType | None) -> None:
        received.set()
        if grace == 0:
            interrupt(number, frame)
        signal.setitimer(signal.ITIMER_REAL, grace)

    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    if not main or not (before in (signal.SIG_DFL, _terminate) or "SUBMITIT_EXECUTOR" in os.environ):
        yield received
        return
    alarm = signal.signal(signal.SIGALRM, interrupt)
    signal.signal(signal.SIGTERM, handle)
    try:
        yield received
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGALRM, alarm)


def wait_to_be_killed() -> NoReturn:
    """Wait until the process is killed; handle signals meanwhile."""
    while True:
        signal.pause()
