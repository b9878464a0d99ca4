"""What goes on beside other work."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(action: Callable[[], object], pause: float) -> Iterator[None]:
    """Call an action every `pause` seconds, in a thread, until the block ends; it has come to its end by then."""
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
