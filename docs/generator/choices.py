"""Files of `conf/` as readers see them: a comment on top, settings, a comment behind each."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

LINE = re.compile(r"(?P<indent> *)(?P<key>[\w.]+):(?: +(?P<value>\S.*?))??(?: +# (?P<note>.*))?$")
HIDDEN = ("defaults", "hydra")
"""Keys that are Hydra's own; so are those that begin with an underscore."""


class Setting(NamedTuple):
    """A key that a file sets.

    Attributes:
        key: dotted path within the file.
        value: as it is written there.
        note: the comment behind it, and below it where it goes on.
    """

    key: str
    value: str
    note: str


class Choice(NamedTuple):
    """One file of a group.

    Attributes:
        name: what is written behind `<group>=`.
        comment: the lines on top, one text each.
        settings: all keys with a value, in the file's order.
    """

    name: str
    comment: tuple[str, ...]
    settings: tuple[Setting, ...]

    @property
    def values(self) -> Mapping[str, str]:
        """Values by key."""
        return {setting.key: setting.value for setting in self.settings}


def list_choices(group: Path) -> list[Choice]:
    """Return the choices of a folder of `conf/` by name, those of its folders left out."""
    return [read_choice(path) for path in sorted(group.glob("*.yaml"))]


def read_choice(path: Path) -> Choice:
    """Return what a file says to its reader.

    Raises:
        ValueError: a line that is neither a comment nor `key: value`.
    """
    comment: list[str] = []
    settings: list[Setting] = []
    parents: list[tuple[int, str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("#"):
            words = text.removeprefix("#").strip()
            if not settings and not line.startswith(" "):
                comment += [] if words.startswith("@package") else [words]
            elif settings:
                settings[-1] = settings[-1]._replace(note=f"{settings[-1].note} {words}".strip())
            continue
        found = LINE.match(line)
        if found is None:
            if text and not text.startswith("- "):
                raise ValueError(f"{path}: {text!r} is no setting")
            continue
        indent = len(found["indent"])
        parents = [(width, key) for width, key in parents if width < indent] + [(indent, found["key"])]
        keys = [key for _, key in parents]
        if found["value"] is not None and keys[0] not in HIDDEN and not any(k[0] == "_" for k in keys):
            settings.append(Setting(".".join(keys), found["value"], found["note"] or ""))
    return Choice(path.stem, tuple(comment), tuple(settings))


def read_sweep(path: Path) -> dict[str, str]:
    """Return the lists that a file of `conf/sweeps` goes through, by key."""
    inside = path.read_text(encoding="utf-8").partition("    params:\n")[2]
    return dict(line.strip().split(": ", 1) for line in inside.splitlines() if line.strip())
