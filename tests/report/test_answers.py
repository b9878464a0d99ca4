"""Texts side by side: whole at any width, the first word that differs in brackets, long ones cut around it."""

import doctest
import hashlib
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kvbench.report import answers
from kvbench.report.answers import show_answers
from tests.support.image_sets import write_lines
from tests.support.results import made_up

FULL = "The sky is blue, since air scatters short waves more than long ones; at dusk the way is long."
OURS = FULL.replace("scatters", "reflects") + " Then\x1b[31m it is [red]."


def test_examples_hold() -> None:
    assert doctest.testmod(answers).attempted == 1
    assert doctest.testmod(answers).failed == 0


def write(folder: Path, texts: Sequence[str]) -> None:
    """A run's folder with texts, of which the first was cut."""
    (folder / "texts").mkdir(parents=True)
    lines = []
    for index, text in enumerate(texts):
        (folder / "texts" / f"{index:06d}.txt").write_text(text)
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        record = {"index": index, "seed": 0, "prompt": f"p {index}", "tokens": 9, "sha256": sha256}
        lines.append({**record, "ended": index > 0})
    write_lines(folder, lines)


def print_texts(root: Path, ours: Sequence[str], full: Sequence[str], width: int, **of_console: bool) -> str:
    run = made_up("h2o", 0.1, {}, n=len(ours))
    write(root / run.run, ours)
    write(root / str(run.reference), full)
    run = replace(run, config={**run.config, "prompts": {"_target_": "kvbench.prompts.files.PromptFile"}})
    console = Console(width=width, file=io.StringIO(), **of_console)
    show_answers(console, root / run.run, run)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_both_texts_are_whole_at_any_width(tmp_path: Path, width: int) -> None:
    lines = print_texts(tmp_path, [OURS], [FULL], width).splitlines()
    assert max(map(len, lines)) <= width
    start = next(number for number, line in enumerate(lines) if "──" in line) + 1
    assert "differs after 6 words" in " ".join(" ".join(line[width // 2 :] for line in lines[:start]).split())
    sides = [" ".join(" ".join(line[part] for line in lines[start:]).split()) for part in (
        slice(width // 2), slice(width // 2, None)
    )]  # fmt: skip
    cut = " (cut at 9 tokens)"
    assert sides[0] == FULL.replace("scatters", "[scatters]") + cut
    assert sides[1] == OURS.replace("reflects", "[reflects]").replace("\x1b[31m", " [31m") + cut
    assert "\x1b" not in "".join(lines)


def test_a_terminal_highlights_the_word(tmp_path: Path) -> None:
    out = print_texts(tmp_path, [OURS], [FULL], 200, force_terminal=True)
    assert "\x1b[1;7m[scatters]\x1b[0m" in out
    assert "\x1b[1;7m[reflects]\x1b[0m" in out
    assert "\x1b[31m" not in out


def test_long_texts_are_cut_around_the_difference(tmp_path: Path) -> None:
    full = "\n".join(f"line {number}" for number in range(200))
    out = print_texts(tmp_path, [full.replace("line 100\n", "line 7\n"), full, full[:-4]], [full] * 3, 80)
    first, same, ended = [block.split() for block in out.split("prompt ")[1:]]
    assert first.count("...") == 4
    assert (first.count("[100]"), first.count("[7]")) == (1, 1)
    assert [number for number in ("91", "92", "139", "140") if number in first] == ["92", "139"]
    assert (same.count("..."), "151" in same, "152" in same, "199" in same) == (2, False, True, True)
    assert "line[end]" in ended
