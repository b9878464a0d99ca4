"""Commands of the documentation: each is composed or parsed; those that no mark says to need something are executed."""

import argparse
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import tomllib
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
from kvbench.extras.share.publish.command import publish
from kvbench.extras.share.verify.command import verify
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


EXECUTED = [
    page
    for page in PAGES
    if any(not b.mark and b.language in ("bash", "python") for b in read_blocks((ROOT / page).read_text()))
]
"""Pages with blocks that are executed."""


@pytest.mark.parametrize("page", PAGES)
def test_blocks_say_what_they_are(page: str) -> None:
    blocks = read_blocks((ROOT / page).read_text())
    assert [b for b in blocks if b.language not in LANGUAGES and not b.language.startswith("{")] == []
    assert [b for b in blocks if b.mark not in ("", *MARKS)] == []
    fences = re.findall(r"^```", (ROOT / page).read_text(), re.MULTILINE)
    assert 2 * len(blocks) == len(fences)


def test_commands_of_another_commit_check_it_out() -> None:
    checked_out = re.compile(r"git worktree add \.\./old ([0-9a-f]{8})\ncd \.\./old\n(?:.+\n)+")
    for page in PAGES:
        for block in read_blocks((ROOT / page).read_text()):
            found = checked_out.fullmatch(block.text)
            assert (block.what if block.mark == "at" else None) == (found[1] if found else None), page


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # it is imported already
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
    """Follow a page from top to bottom in a checkout of its own: write its files, execute its unmarked blocks."""
    check_out(tmp_path)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path), "PATH": path}
    blocks = read_blocks((ROOT / page).read_text())
    for block in blocks:
        if block.mark == "file":
            assert not (tmp_path / block.what).exists(), f"{page}: {block.what} is there already"
            (tmp_path / block.what).write_text(block.text)
        elif not block.mark and block.language in ("bash", "python"):
            program = ["bash", "-e", "-c"] if block.language == "bash" else ["python", "-c"]
            assert "failed" not in call([*program, block.text], tmp_path, environment)
        elif (
            block.language == "bash" and block.mark != "at" and any(other.mark == "file" for other in blocks)
        ):
            for words in find_commands(f"```bash\n{block.text}```"):
                if words[:2] == ["python", "run.py"] and words[2] != "show":
                    shown = [word for word in words if word != "-m"]
                    call([*shown, "--cfg", "job"], tmp_path, environment)


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
            return parse(module, find_source(module), arguments, monkeypatch)
        case ["python", script, *arguments]:
            return parse(str(ROOT / script), ROOT / script, arguments, monkeypatch)
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
    readers = {"publish": publish, "verify": verify, "list": show_list}
    try:
        match arguments:
            case ["--version"]:
                return None
            case ["publish" | "verify" | "list" as program, *words]:
                with tempfile.TemporaryDirectory() as folder, chdir(folder):
                    readers[program](words)
                return None
            case ["show", *words]:
                return _compose(tuple(split_prompt(words)[1]))
            case ["new", *words]:
                with tempfile.TemporaryDirectory() as folder, chdir(folder):
                    Path("kvbench", "methods").mkdir(parents=True)  # with run.py, a checkout
                    Path("run.py").touch()
                    new.new([word.replace("NAME", "my_words") for word in words])
                return None
    except ConfigError as error:  # the folders that words name need not exist
        lacking = re.match(r"(verify: \S+: no such folder|publish: \S+ is not a finished run)", str(error))
        return None if lacking else str(error)
    return _compose(tuple(word for word in arguments if word != NOT_INSTALLED))


def find_source(module: str) -> Path | None:
    """Return the file of a module, or of what `python -m` runs of a package; None if there is none."""
    found = importlib.util.find_spec(module)
    if found is not None and found.submodule_search_locations:
        found = importlib.util.find_spec(f"{module}.__main__")
    return None if found is None or found.origin is None else Path(found.origin)


def parse(
    name: str, source: Path | None, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> str | None:
    """Let a program read its arguments, and stop it there; one that reads none may be given none."""
    if source is None or not source.is_file():
        return "no such program"
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
    """Return what is wrong with what pip is told to install: a folder without a package, an extra that is not there."""
    name, _, extras = what.rstrip("]").partition("[")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    unknown = set(filter(None, extras.split(","))) - set(project["optional-dependencies"])
    is_folder = "/" in name and "*" not in name and not (ROOT / name / "pyproject.toml").is_file()
    return f"no such package or extras: {what}" if unknown or is_folder else None
