"""Limit on the processor time of a call."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def limit_processor_time(seconds: float, error: Exception) -> Iterator[None]:
    """Raise `error` in the block once this process has computed for `seconds`; time in which it waits does not count.

    It works in the main thread only, where Python handles signals; in others it raises a ValueError.
    """

    def interrupt(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as Python calls it
        raise error

    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
