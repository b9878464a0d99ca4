"""`kvbench new method NAME` and `kvbench new package NAME`: the files of a method of one's own."""

import keyword
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from kvbench.cli.config.compose import hydra_of_kvbench
from kvbench.cli.config.search_path import list_choices
from kvbench.cli.console import say
from kvbench.core.config import ConfigError
from kvbench.core.files import read_text
from kvbench.core.plugins import GROUP

USAGE = "kvbench new method NAME | kvbench new package NAME"


class Place(NamedTuple):
    """Folders that take the files of a method.

    Attributes:
        package: package of the method's module.
        code: folder of the module.
        conf: folder of configuration groups.
        tests: folder of tests.
        command: start of a command line that finds the method.
    """

    package: str
    code: Path
    conf: Path
    tests: Path
    command: str


def new(words: Sequence[str]) -> None:
    """Write the files of a new method or package, list them, and print the commands that come next.

    Args:
        words: words of the command after `new`.

    Raises:
        ConfigError: the words name nothing to write, or a name or file exists already.
        OSError: an error of the disk.
    """
    if {"-h", "--help"} & set(words):
        say(f"usage: {USAGE}")
        return
    kind, name = parse_words(words)
    _check_name(kind, name)
    if kind == "method":
        place = find_place(Path())
        contents: dict[str, Path] = {}
    else:
        place, contents = describe_package(name)
    contents |= list_method_files(place)
    paths = write_files(contents, {"your_module": f"{place.package}.{name}", **_spell(name)})
    for path in paths:
        say(f"wrote: {path}")
    install = f"pip install -e {name}; " if kind == "package" else ""
    test = place.tests / f"test_{name}.py"
    say(f"next: {install}{place.command} method={name} budget=0.1 smoke=true; python -m pytest {test}")


def parse_words(words: Sequence[str]) -> tuple[str, str]:
    """Return the kind (`method` or `package`) and the name of what is new.

    Raises:
        ConfigError: the words are something else.
    """
    if len(words) != 2 or words[0] not in ("method", "package"):
        raise ConfigError(f"{' '.join(('new', *words))}: not a kind and a name; {USAGE}")
    return words[0], words[1]


def find_place(folder: Path) -> Place:
    """Return where a method goes: in a checkout of kvbench, or in the package whose folder this is.

    Raises:
        ConfigError: the folder is neither.
    """
    if (folder / "run.py").is_file() and (folder / "kvbench" / "methods").is_dir():
        tests = folder / "tests" / "methods"
        return Place("kvbench.methods", folder / "kvbench/methods", folder / "conf", tests, "python run.py")
    try:
        project = tomllib.loads(read_text(folder / "pyproject.toml"))["project"]
        package = next(iter(project["entry-points"][GROUP].values())).removesuffix(".conf")
    except (OSError, ValueError, KeyError, AttributeError, StopIteration):
        raise ConfigError(
            f"new method: {folder.absolute()} is neither a checkout of kvbench nor a package with an entry point "
            f"{GROUP}; change to one, or start with `kvbench new package NAME`"
        ) from None
    code = folder / package.replace(".", "/")
    return Place(package, code, code / "conf", folder / "tests", "kvbench")


def describe_package(name: str) -> tuple[Place, dict[str, Path]]:
    """Return where the first method of a new package goes, and the package's other files by template."""
    folder, code = Path(name), Path(name, name)
    contents = {
        "pyproject.toml": folder / "pyproject.toml",
        "package.py": code / "__init__.py",
        "conf.py": code / "conf" / "__init__.py",
    }
    return Place(name, code, code / "conf", folder / "tests", "kvbench"), contents


def list_method_files(place: Place) -> dict[str, Path]:
    """Return the files of a method by template, with `your_method` in place of its name."""
    return {
        "method.py": place.code / "your_method.py",
        "method.yaml": place.conf / "method" / "your_method.yaml",
        "test_method.py": place.tests / "test_your_method.py",
    }


def write_files(contents: Mapping[str, Path], names: Mapping[str, str]) -> list[Path]:
    """Write templates with names in place of placeholders, all of them or none; return their paths.

    Args:
        contents: paths by template in `assets/new`.
        names: names by placeholder.

    Raises:
        ConfigError: a file exists.
    """

    def fill(text: str) -> str:
        return re.sub("|".join(names), lambda match: names[match[0]], text)

    paths = {template: Path(fill(str(path))) for template, path in contents.items()}
    if existing := [path for path in paths.values() if path.exists()]:
        raise ConfigError(f"new: {existing[0]} exists; choose another name or delete it")
    for template, path in paths.items():
        text = (files("kvbench") / "assets" / "new" / f"{template}.txt").read_text(encoding="utf-8")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(fill(text), encoding="utf-8")
    return list(paths.values())


def _spell(name: str) -> dict[str, str]:
    """Return the forms of a name by placeholder: of a module, a class, a package and a distribution."""
    return {
        "your_method": name,
        "YourMethod": "".join(part.capitalize() for part in name.split("_")),
        "your_package": name,
        "your-package": name.replace("_", "-"),
    }


def _check_name(kind: str, name: str) -> None:
    """Check that a name is a module's and is new.

    Raises:
        ConfigError: it is not.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"new {kind} {name}: not a module's name; use lower-case letters, digits and single _, such as my_method"
        )
    with hydra_of_kvbench():
        known = list_choices("method")
    if name in known:
        raise ConfigError(f"new {kind} {name}: method={name} exists; choose another name")
    if kind == "package" and (Path(name).exists() or find_spec(name) is not None):
        raise ConfigError(
            f"new package {name}: a folder or an installed package has this name; choose another"
        )
    if kind == "method" and find_spec(f"kvbench.methods.{name}") is not None:
        raise ConfigError(f"new method {name}: kvbench.methods.{name} exists; choose another name")
