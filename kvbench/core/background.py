"""Work in a second thread beside the main one."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

Work = Callable[[], object]


@contextmanager
def repeating(action: Work, pause: float) -> Iterator[None]:
    """Call an action every `pause` seconds in a thread until the block ends; wait for a running call."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(pause):
            action()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def working_beside(max_: int) -> Iterator[Callable[[Work], None]]:
    """Run pieces of work in a second thread, in the order in which they are submitted.

    All pieces are done when the block ends, even if an error ends it. At most `max_` pieces are pending: submitting
    another waits for the oldest.

    Yields:
        A function that submits a piece of work. It raises the error of an earlier piece, and so does the end of the
        block unless another error ends it; later pieces are done nevertheless.
    """
    pending: deque[Future[object]] = deque()

    def submit(work: Work) -> None:
        while len(pending) >= max_:
            pending.popleft().result()
        pending.append(thread.submit(work))

    with ThreadPoolExecutor(1) as thread:
        yield submit
        while pending:
            pending.popleft().result()
