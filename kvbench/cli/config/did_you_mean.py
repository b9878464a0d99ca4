"""Suggestions for misspelt keys and choices."""

from collections.abc import Sequence
from difflib import get_close_matches


def did_you_mean(name: str | None) -> str:
    """Return the end of a message that suggests a name; empty for None."""
    return "" if name is None else f"; did you mean {name}?"


def suggest_choice(choice: str, choices: Sequence[str]) -> str | None:
    """Return the choice of a group closest to a misspelt one; None if none is close."""
    return next(iter(get_close_matches(choice, choices, 1)), None)


def suggest_key(key: str, keys: Sequence[str]) -> str | None:
    """Return the configuration key closest to a misspelt one; None if none is close.

    A nested key such as `method.x` never suggests its group `method`.
    """
    group, _, inner = key.rpartition(".")
    near = (one for one in get_close_matches(key, keys, 3) if not inner or one != group)
    return next(near, None)
