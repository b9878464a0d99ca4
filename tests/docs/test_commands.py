"""Commands of the documentation: each is composed or parsed; those that no mark says to need something are executed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import find_problem
from tests.support.pages import MARKS, find_commands, list_pages, read_blocks
from tests.support.places import ROOT

PAGES = list_pages()
LANGUAGES = ("bash", "json", "python", "text", "toml", "yaml")


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
@pytest.mark.parametrize("page", EXECUTED)
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
                if words[:2] == ["python", "run.py"]:
                    shown = [word for word in words if word != "-m"]
                    call([*shown, "--cfg", "job"], folder, environment)


def call(words: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Return what a command that has to succeed prints."""
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
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
