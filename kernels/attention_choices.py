"""The paths that attention takes, told to whoever watches: `task=profile` prints them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Choice(NamedTuple):
    """A path that was chosen.

    Attributes:
        path: its name.
        others: names of the other paths, each with the reason why it was not taken.
    """

    path: str
    others: tuple[tuple[str, str], ...] = ()


_watchers: list[Callable[[Choice], object]] = []


@contextmanager
def watch_choices(note: Callable[[Choice], object]) -> Iterator[None]:
    """Tell `note` each choice, at the call of attention that it is made for."""
    _watchers.append(note)
    try:
        yield
    finally:
        _watchers.remove(note)


def note_choice(explain: Callable[[], Choice]) -> None:
    """Tell a choice; without a watcher it is not even explained."""
    for note in _watchers:
        note(explain())
