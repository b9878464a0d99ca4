"""Notification of observers about the attention path of each call; `task=profile` prints the paths."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class AttentionChoice(NamedTuple):
    """Attention path chosen for a call.

    Attributes:
        path: name of the path.
        others: names of the other paths, each with the reason against it.
    """

    path: str
    others: tuple[tuple[str, str], ...] = ()


_observers: list[Callable[[AttentionChoice], object]] = []


@contextmanager
def watch_choices(note: Callable[[AttentionChoice], object]) -> Iterator[None]:
    """Pass each choice to `note`, at the attention call that it is made for."""
    _observers.append(note)
    try:
        yield
    finally:
        _observers.remove(note)


def note_choice(explain: Callable[[], AttentionChoice]) -> None:
    """Pass a choice to all observers; without observers, `explain` is not called."""
    for note in _observers:
        note(explain())
