"""What is wrong with a command of ours: it is composed, or its program reads its arguments; nothing of it is done."""

import argparse
import importlib.util
import re
import runpy
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.config.command import SHORT_FORMS, name_base
from kvbench.cli.config.messages import check_arguments
from kvbench.cli.tasks import new
from kvbench.core.config import ConfigError
from kvbench.extras.share.publish import command as publish
from kvbench.extras.share.verify import command as verify
from tests.support.places import ROOT

FOREIGN = ("apptainer", "cd", "docker", "git", "source", "trackio", "venv")
"""Programs that are not ours: a page may call them, and what they are told is not looked at."""
ENVIRONMENT = "slim"
"""Virtual environment that a page makes."""
NOT_INSTALLED = "logger=trackio"
"""Choice of an extra that `dev` leaves out."""


class Parsed(BaseException):
    """Raised in place of a program's work, once it has read its arguments."""


def name_program(words: list[str]) -> list[str]:
    """Return a command with plain names of Python, pip and foreign modules, also in the environment of a page."""
    named = [words[0].removeprefix(f"{ENVIRONMENT}/bin/").replace("python3", "python"), *words[1:]]
    is_module = named[:2] == ["python", "-m"] and named[2] in ("pip", *FOREIGN)
    return named[2:] if is_module else named


def find_problem(words: list[str], monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Return what is wrong with a command, None for nothing; nothing of it is done."""
    match name_program(words):
        case ["python", "run.py", *arguments] | ["kvbench", *arguments]:
            return compose([name_base(SHORT_FORMS.get(word, word)) for word in arguments])
        case ["torchrun", "--nproc-per-node", _, "run.py", *arguments]:
            return compose(arguments)
        case ["python", "-m", "benchmarks", "profile_task", *arguments]:
            return compose(["task=profile", *arguments])
        case ["python", "-m", "pytest", *arguments] | ["pytest", *arguments]:
            missing = [a for a in arguments if a.startswith("tests") and not (ROOT / a).exists()]
            return f"no such tests: {missing}" if missing else None
        case ["python", "-m", module, *arguments]:
            found = importlib.util.find_spec(module)
            return (
                "no such module"
                if found is None
                else parse(module, find_source(module), arguments, monkeypatch)
            )
        case ["python", script, *arguments]:
            path = ROOT / script
            return parse(str(path), path, arguments, monkeypatch) if path.is_file() else "no such file"
        case ["make", *targets]:
            known = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            return f"no such target: {targets}" if set(targets) - set(known) else None
        case ["pip", "install", *what]:
            return check_installation(what[-1])
        case [program, *_]:
            return None if program in FOREIGN else f"nothing is known of {program}"
    return "no command"


@cache
def _compose(arguments: tuple[str, ...]) -> str | None:
    return check_arguments(list(arguments))


def compose(arguments: list[str]) -> str | None:
    """Compose what a command chooses; plugins of the example are found."""
    if any("kvbench_example" in word or "random_tokens" in word for word in arguments):
        return None  # tests/cli/test_plugins.py runs these
    if arguments == ["--version"]:
        return None
    if arguments[:1] == ["publish"]:
        return read_request(publish.parse_words, arguments[1:])
    if arguments[:1] == ["verify"]:
        return read_request(verify.parse_words, arguments[1:])
    if arguments[:1] == ["new"]:
        return read_request(new.parse_words, arguments[1:])
    return _compose(tuple(word for word in arguments if word != NOT_INSTALLED))


def read_request(parse_words: Callable[[list[str]], object], words: list[str]) -> str | None:
    """Read the words of a command that composes nothing."""
    try:
        parse_words(words)
    except ConfigError as error:
        return str(error)
    return None


def find_source(module: str) -> Path:
    """Return the file of a module, or of what `python -m` runs of a package."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None or found.submodule_search_locations:
        found = importlib.util.find_spec(f"{module}.__main__")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin)


def parse(name: str, source: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Let a program read its arguments, and stop it there; one that reads none may be given none."""
    if "parse_args(" not in source.read_text():
        return f"it takes no arguments, not {arguments}" if arguments else None
    original = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *given: Any, **named: Any) -> None:
        original(parser, *given, **named)
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", [str(source), *arguments])
        patch.syspath_prepend(str(source.parent))
        try:
            (runpy.run_path if name == str(source) else runpy.run_module)(name, run_name="__main__")
        except Parsed:
            return None
        except SystemExit as end:
            return f"ends with {end.code}"
    return "reads no arguments"


def check_installation(what: str) -> str | None:
    """Return what is wrong with what pip is told to install: kvbench, a wheel, a folder, an extra, weights of conf."""
    if what == "dist/kvbench-*.whl" or what in list_packages_of_weights():  # what `make wheel` leaves
        return None
    name, _, extras = what.rstrip("]").partition("[")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if name != "kvbench" and not (ROOT / name / "pyproject.toml").is_file():
        return f"there is no package {name}"
    unknown = set(filter(None, extras.split(","))) - set(project["optional-dependencies"])
    return f"no such extras: {unknown}" if unknown else None


def list_packages_of_weights() -> set[str]:
    """Return the packages of weights that configurations tell to install, with their versions."""
    texts = (path.read_text() for path in (ROOT / "conf").rglob("*.yaml"))
    return {name for text in texts for name in re.findall(r"pip install --no-deps (\S+==[\d.]+)", text)}
