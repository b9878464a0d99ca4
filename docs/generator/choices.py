"""Reader for files of `conf/`: the comment at the top, the settings, and the comment behind each setting."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvbench.cli.config.compose import hydra_of_kvbench
from kvbench.cli.config.search_path import make_each

LINE = re.compile(r"(?P<indent> *)(?P<key>[\w.]+):(?: +(?P<value>\S.*?))??(?: +# (?P<note>.*))?$")
HIDDEN = ("defaults", "hydra")
"""Keys that belong to Hydra, like all that begin with an underscore."""
SHARED = re.compile(r"(?<!\w)/(\w+)@_here_")
"""Entry of a defaults list that takes the settings of a file at the top of `conf/`."""


class Setting(NamedTuple):
    """A key that a file sets.

    Attributes:
        key: dotted path within the file.
        value: as written in the file.
        note: the comment behind it, including continuation lines.
    """

    key: str
    value: str
    note: str


class Choice(NamedTuple):
    """One file of a group.

    Attributes:
        name: the value of `<group>=` on the command line.
        comment: lines of the comment at the top.
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
    """Return the choices of a folder of `conf/`, sorted by name, without subfolders."""
    return [read_choice(path) for path in sorted(group.glob("*.yaml"))]


def read_choice(path: Path) -> Choice:
    """Read the comments and settings of a file.

    Raises:
        ValueError: a line is neither a comment nor `key: value`.
    """
    comment: list[str] = []
    settings: list[Setting] = []
    parents: list[tuple[int, str]] = []
    shared: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("#"):
            words = text.removeprefix("#").strip()
            if not settings and not line.startswith(" "):
                comment += [] if words.startswith("@package") else [words]
            elif settings:
                settings[-1] = settings[-1]._replace(note=f"{settings[-1].note} {words}".strip())
            continue
        match = LINE.match(line)
        if match is None:
            if text and not text.startswith("- "):
                raise ValueError(f"{path}: {text!r} is no setting")
            continue
        indent = len(match["indent"])
        parents = [(width, key) for width, key in parents if width < indent] + [(indent, match["key"])]
        keys = [key for _, key in parents]
        if keys == ["defaults"]:
            shared = SHARED.findall(match["value"] or "")
        if match["value"] is not None and keys[0] not in HIDDEN and not any(k[0] == "_" for k in keys):
            settings.append(Setting(".".join(keys), match["value"], match["note"] or ""))
    for name in shared:
        top = next(folder for folder in path.parents if (folder / f"{name}.yaml").is_file())
        settings += read_choice(top / f"{name}.yaml").settings
    return Choice(path.stem, tuple(comment), tuple(settings))


def build(group: str, names: Iterable[str]) -> dict[str, Any]:
    """Return the objects that choices of a group instantiate to, by name; other settings are the defaults."""
    with hydra_of_kvbench():
        return dict(make_each(group, list(names)))
