"""SIGTERM: a worker ends between two blocks, and a command that waits for other processes ends with them."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

TERMINATED = 128 + signal.SIGTERM
"""Exit status after SIGTERM, as shells have it."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, for code that handles Ctrl-C."""


@contextmanager
def interrupting_on_sigterm() -> Iterator[None]:
    """Have SIGTERM interrupt the process as Ctrl-C does, so that joblib ends the processes that it started.

    Raises:
        Terminated: the process got SIGTERM.
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

    A launcher that handles SIGTERM by itself keeps its handler, and the event is never set; submitit, which only logs
    the signal, gets its handler back at the end.

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
    before = signal.getsignal(signal.SIGTERM)
    if not main or not (before in (signal.SIG_DFL, _terminate) or "SUBMITIT_EXECUTOR" in os.environ):
        yield asked
        return
    alarm = signal.signal(signal.SIGALRM, interrupt)
    signal.signal(signal.SIGTERM, ask)
    try:
        yield asked
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGALRM, alarm)


def wait_to_be_killed() -> NoReturn:
    """Do nothing but handle signals."""
    while True:
        signal.pause()
