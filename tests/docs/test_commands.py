"""Commands of the documentation: each is composed or parsed; those that no mark says to need something are executed."""

import argparse
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.config.command import SHORT_FORMS, name_base, name_file
from kvbench.cli.config.messages import check_arguments
from kvbench.cli.tasks import new
from kvbench.cli.tasks.listing import show_list
from kvbench.cli.tasks.show import split_prompt
from kvbench.core.config import ConfigError
from kvbench.extras.share.publish import command as publish
from kvbench.extras.share.verify import command as verify
from tests.support.pages import MARKS, find_commands, list_pages, read_blocks
from tests.support.places import ROOT

PAGES = list_pages()
LANGUAGES = ("bash", "json", "python", "text", "toml", "yaml")
FOREIGN = ("apptainer", "cd", "docker", "git", "source", "trackio", "venv")
"""Programs that are not ours: a page may call them, and what they are told is not looked at."""
ENVIRONMENT = "slim"
"""Virtual environment that a page makes."""
NOT_INSTALLED = "logger=trackio"
"""Choice of an extra that `dev` leaves out."""


def is_executed(text: str) -> bool:
    """Whether a page has a block that is executed."""
    return any(not b.mark and b.language in ("bash", "python") for b in read_blocks(text))


EXECUTED = [page for page in PAGES if is_executed((ROOT / page).read_text())]


@pytest.mark.parametrize("page", PAGES)
def test_blocks_say_what_they_are(page: str) -> None:
    blocks = read_blocks((ROOT / page).read_text())
    assert [b for b in blocks if b.language not in LANGUAGES and not b.language.startswith("{")] == []
    assert [b for b in blocks if b.mark not in ("", *MARKS)] == []
    fences = re.findall(r"^```", (ROOT / page).read_text(), re.MULTILINE)
    assert 2 * len(blocks) == len(fences)


def test_commands_of_another_commit_check_it_out_and_are_left_out() -> None:
    checked_out = re.compile(r"git worktree add \.\./old ([0-9a-f]{8})\ncd \.\./old\n(?:.+\n)+")
    for page in PAGES:
        for block in read_blocks((ROOT / page).read_text()):
            found = checked_out.fullmatch(block.text)
            assert (block.what if block.mark == "at" else None) == (found[1] if found else None), page
    text = "<!-- at: 1a2b3c4d -->\n```bash\npython run.py gone=1\n```\n"
    assert not is_executed(text)
    assert list(find_commands(f"{text}\n```bash\nmake test\n```\n")) == [["make", "test"]]


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*found in sys.modules:RuntimeWarning"
)  # a module is run that is imported already
@pytest.mark.parametrize("page", PAGES)
def test_commands_fit_their_programs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = [b.what for b in read_blocks((ROOT / page).read_text()) if b.mark == "file"]
    if any(path.startswith("conf/") for path in written):  # choices that the page tells its reader to write
        pytest.skip("executed or composed below, where these files are")
    monkeypatch.chdir(tmp_path)
    problems = [
        f"{' '.join(words)}: {problem}"
        for words in find_commands((ROOT / page).read_text())
        if (problem := find_problem(words, monkeypatch)) is not None
    ]
    assert problems == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page if page == "docs/start.md" else pytest.param(page, marks=pytest.mark.nightly) for page in EXECUTED],
)
def test_blocks_without_a_mark_run(page: str, tmp_path: Path) -> None:
    run_page(page, tmp_path)
    if page == "docs/extending.md":
        check_new_methods(tmp_path / "runs" / "infinity_tiny")


def check_new_methods(runs: Path) -> None:
    """Methods of the page on extending use the budget, do not exceed it, and do better with more of it."""
    for method in ("newest", "heaviest", "by_recall"):
        quality = []
        for budget in (0.1, 0.3):
            path = min(runs.glob(f"{method}-{budget}-*/results.json"))
            results = json.loads(path.read_text())
            memory = results["memory"]
            assert 0.5 * memory["budget_tokens"] < memory["peak_tokens"] <= memory["budget_tokens"]
            quality.append(results["metrics"]["psnr"]["value"])
        assert quality[0] < quality[1]


def run_page(page: str, folder: Path) -> None:
    """Follow a page from top to bottom in a checkout of its own: write its files, execute its unmarked blocks."""
    check_out(folder)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), "PATH": path}
    blocks = read_blocks((ROOT / page).read_text())
    for block in blocks:
        if block.mark == "file":
            assert not (folder / block.what).exists(), f"{page}: {block.what} is there already"
            (folder / block.what).write_text(block.text)
        elif not block.mark and block.language in ("bash", "python"):
            program = ["bash", "-e", "-c"] if block.language == "bash" else ["python", "-c"]
            assert "failed" not in call([*program, block.text], folder, environment)
        elif (
            block.language == "bash" and block.mark != "at" and any(other.mark == "file" for other in blocks)
        ):
            for words in find_commands(f"```bash\n{block.text}```"):
                if words[:2] == ["python", "run.py"] and words[2] != "show":
                    shown = [word for word in words if word != "-m"]
                    call([*shown, "--cfg", "job"], folder, environment)


def call(words: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Return what a command that has to succeed prints."""
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check_out(folder: Path) -> None:
    """Make a checkout to write into, with `python` and `kvbench` to call."""
    # Compiled modules come along, half-written ones do not.
    kept_out = shutil.ignore_patterns("assets", "*.pyc.*")
    for name in ("kvbench", "kernels", "eval", "conf"):
        shutil.copytree(ROOT / name, folder / name, ignore=kept_out)
    shutil.copy(ROOT / "run.py", folder)
    for name in ("kvbench/assets", "docs", "benchmarks", "tests"):
        (folder / name).symlink_to(ROOT / name)
    start = "from kvbench.cli.app import main; main()"
    for name, call in (("python", ""), ("kvbench", f'-c "{start}"')):
        script = folder / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {call} "$@"\n')
        script.chmod(0o755)


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
            return compose([*name_file([name_base(SHORT_FORMS.get(word, word)) for word in arguments])])
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
        return read_request(publish.parse_arguments, arguments[1:])
    if arguments[:1] == ["verify"]:
        return read_request(verify.parse_arguments, arguments[1:])
    if arguments[:1] == ["list"]:
        return read_request(show_list, arguments[1:])
    if arguments[:1] == ["show"]:
        return _compose(tuple(split_prompt(arguments[1:])[1]))
    if arguments[:1] == ["new"]:
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            Path("kvbench", "methods").mkdir(parents=True)  # with run.py, a checkout
            Path("run.py").touch()
            return read_request(new.new, [word.replace("NAME", "my_words") for word in arguments[1:]])
    return _compose(tuple(word for word in arguments if word != NOT_INSTALLED))


def read_request(parse_arguments: Callable[[list[str]], object], words: list[str]) -> str | None:
    """Read the words of a command that composes nothing."""
    try:
        parse_arguments(words)
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
