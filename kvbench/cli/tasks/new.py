"""`kvbench new method NAME` and `kvbench new package NAME`: the files of a user's own method."""

import keyword
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from kvbench.cli.config.compose import hydra_of_kvbench
from kvbench.cli.config.search_path import list_choices
from kvbench.cli.console import say
from kvbench.core.config import ConfigError
from kvbench.core.files import read_text
from kvbench.core.plugins import GROUP

USAGE = "kvbench new method NAME | kvbench new package NAME"
METHOD_FILES = {
    "method.py": "{code}/{name}.py",
    "method.yaml": "{conf}/method/{name}.yaml",
    "test_method.py": "{tests}/test_{name}.py",
}
"""Path for each template of `assets/new`, by the folders of a `Place` and the name of the method."""
PACKAGE_FILES = {
    "pyproject.toml": "{name}/pyproject.toml",
    "package.py": "{code}/__init__.py",
    "conf.py": "{conf}/__init__.py",
}
Place = Mapping[str, str]
"""Folders `code`, `conf` and `tests` of a method, its `package`, and the `command` that finds it there."""


def new(words: Sequence[str]) -> None:
    """Write the files of a new method or package, list them, and print the commands that come next.

    Args:
        words: words of the command after `new`.

    Raises:
        ConfigError: the words name nothing to write, or a name or file exists already.
        OSError: an error of the disk.
    """
    if len(words) != 2 or words[0] not in ("method", "package"):
        raise ConfigError(f"{' '.join(('new', *words))}: not a kind and a name; {USAGE}")
    kind, name = words
    _check_name(kind, name)
    if kind == "method":
        place, templates = find_place(Path()), METHOD_FILES
    else:
        folders = {"code": f"{name}/{name}", "conf": f"{name}/{name}/conf", "tests": f"{name}/tests"}
        place, templates = {"package": name, "command": "kvbench", **folders}, PACKAGE_FILES | METHOD_FILES
    for path in write_files(templates, name, place):
        say(f"wrote: {path}")
    install = f"pip install -e {name}; " if kind == "package" else ""
    test = f"{place['tests']}/test_{name}.py"
    say(f"next: {install}{place['command']} method={name} budget=0.1 smoke=true; python -m pytest {test}")


def find_place(folder: Path) -> Place:
    """Return where a method goes: in a checkout of kvbench, or in the package whose folder this is.

    Raises:
        ConfigError: the folder is neither.
    """
    if (folder / "run.py").is_file() and (folder / "kvbench" / "methods").is_dir():
        return {
            "package": "kvbench.methods", "code": "kvbench/methods", "conf": "conf", "tests": "tests/methods",
            "command": "python run.py",
        }  # fmt: skip
    try:
        project = tomllib.loads(read_text(folder / "pyproject.toml"))["project"]
        package = next(iter(project["entry-points"][GROUP].values())).removesuffix(".conf")
    except (OSError, ValueError, KeyError, AttributeError, StopIteration):
        raise ConfigError(
            f"new method: {folder.absolute()} is neither a checkout of kvbench nor a package with an entry point "
            f"{GROUP}; change to one, or start with `kvbench new package NAME`"
        ) from None
    code = package.replace(".", "/")
    return {"package": package, "code": code, "conf": f"{code}/conf", "tests": "tests", "command": "kvbench"}


def write_files(templates: Mapping[str, str], name: str, place: Place) -> list[Path]:
    """Write templates with a method's names in place of placeholders, all of them or none; return their paths.

    Raises:
        ConfigError: a file exists.
    """
    names = {
        "your_module": f"{place['package']}.{name}",
        "your_method": name,
        "YourMethod": "".join(part.capitalize() for part in name.split("_")),
        "your_package": name,
        "your-package": name.replace("_", "-"),
    }
    paths = {template: Path(path.format(name=name, **place)) for template, path in templates.items()}
    if existing := [path for path in paths.values() if path.exists()]:
        raise ConfigError(f"new: {existing[0]} exists; choose another name or delete it")
    for template, path in paths.items():
        text = (files("kvbench") / "assets" / "new" / f"{template}.txt").read_text(encoding="utf-8")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(re.sub("|".join(names), lambda match: names[match[0]], text), encoding="utf-8")
    return list(paths.values())


def _check_name(kind: str, name: str) -> None:
    """Check that a name is a valid module name and is new.

    Raises:
        ConfigError: the name is not valid, or it exists.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"new {kind} {name}: not a module's name; use lower-case letters, digits and single _, such as my_method"
        )
    with hydra_of_kvbench():
        known = list_choices("method")
    if name in known:
        raise ConfigError(f"new {kind} {name}: method={name} exists; choose another name")
    module = name if kind == "package" else f"kvbench.methods.{name}"
    if find_spec(module) is not None:
        raise ConfigError(f"new {kind} {name}: {module} is importable already; choose another name")
