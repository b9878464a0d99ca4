"""Ends of messages about unknown names: the nearest name, a few others, and the command that lists all."""

from collections.abc import Collection
from difflib import get_close_matches

MOST = 8
"""Maximum number of names in a message if a command lists all."""
LIKE = 0.3
"""Minimum similarity (difflib) of the names that are shown in place of all."""
LISTS = {
    "method": "methods", "model": "models", "eval": "metrics", "prompts": "prompts", "sweeps": "sweeps",
    "sampling": "sampling", "task": "tasks",
}  # fmt: skip
"""Argument of `kvbench list` for each group of the configuration, and for the tasks."""


def suggest(given: str, names: Collection[str], group: str = "") -> str:
    """Return the end of a message about an unknown name.

    Args:
        given: the unknown name.
        names: the known names.
        group: group of the configuration whose choices they are, if `kvbench list` shows them.

    >>> suggest("h2", ["full", "h2o"])
    '; did you mean h2o? choose from full, h2o'
    """
    if not names:
        return ""
    near, shown, rest = find_near(given, names), list(names), ""
    if len(shown) > MOST and (kind := LISTS.get(group.partition("/")[0])) is not None:
        shown = get_close_matches(given, names, MOST, LIKE) or shown[:MOST]
        rest = f", ...; all: kvbench list {kind}"
    return f";{f' did you mean {near}?' if near else ''} choose from {', '.join(shown)}{rest}"


def find_near(given: str, names: Collection[str]) -> str | None:
    """Return the name that an unknown one is probably meant to be; None if no name is similar."""
    return next(iter(get_close_matches(given, names, 1)), None)
