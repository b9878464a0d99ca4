"""Progress bars on standard error."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

_hidden = False


def make_bar(**settings: Any) -> "tqdm[Any]":
    """Return a tqdm bar with `settings` that is erased at its end.

    Terminals and notebooks show it; files and jobs of a sweep (`hiding_bars`) do not.
    """
    return tqdm(leave=False, disable=_hidden or (False if "ipykernel" in sys.modules else None), **settings)


@contextmanager
def hiding_bars() -> Iterator[None]:
    """Draw no bars: the progress line of a sweep counts the samples of its jobs."""
    global _hidden
    before, _hidden = _hidden, True
    try:
        yield
    finally:
        _hidden = before
