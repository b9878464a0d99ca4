"""Texts side by side: whole at any width, the first word that differs in brackets, long ones cut around it."""

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from kvbench.core.files import hash_content
from kvbench.report.answers import show_answers
from tests.support.image_sets import write_lines
from tests.support.results import made_up

FULL = "The sky is blue, since air scatters short waves more than long ones; at dusk the way is long."
OURS = FULL.replace("scatters", "reflects") + " Then\x1b[31m it is [red]."


def print_texts(root: Path, ours: Sequence[str], full: Sequence[str], width: int, **of_console: bool) -> str:
    """What is shown of a run's texts beside the full cache's; the first of both was cut."""
    run = made_up("h2o", 0.1, {}, n=len(ours))
    for name, texts in ((run.run, ours), (str(run.reference), full)):
        (root / name / "texts").mkdir(parents=True)
        lines = []
        for index, text in enumerate(texts):
            (root / name / "texts" / f"{index:06d}.txt").write_text(text)
            record = {"index": index, "seed": 0, "prompt": f"p {index}", "tokens": 9, "ended": index > 0}
            lines.append({**record, "sha256": hash_content(text.encode())})
        write_lines(root / name, lines)
    run = replace(run, config={**run.config, "prompts": {"_target_": "kvbench.prompts.files.PromptFile"}})
    console = Console(width=width, file=io.StringIO(), **of_console)
    show_answers(console, root / run.run, run)
    return console.file.getvalue()


def test_both_texts_are_whole_in_a_narrow_terminal(tmp_path: Path) -> None:
    lines = print_texts(tmp_path / "narrow", [OURS], [FULL], 80).splitlines()
    assert max(map(len, lines)) <= 80
    start = next(number for number, line in enumerate(lines) if "──" in line) + 1
    assert "differs after 6 words" in " ".join(" ".join(line[40:] for line in lines[:start]).split())
    sides = [
        " ".join(" ".join(line[part] for line in lines[start:]).split())
        for part in (slice(40), slice(40, None))
    ]
    cut = " (cut at 9 tokens)"
    assert sides[0] == FULL.replace("scatters", "[scatters]") + cut
    assert sides[1] == OURS.replace("reflects", "[reflects]").replace("\x1b[31m", " [31m") + cut
    wide = print_texts(tmp_path / "wide", [OURS], [FULL], 200, force_terminal=True)
    assert all(f"\x1b[1;7m[{word}]\x1b[0m" in wide for word in ("scatters", "reflects"))
    assert "\x1b[31m" not in "".join([wide, *lines])


def test_long_texts_are_cut_around_the_difference(tmp_path: Path) -> None:
    full = "\n".join(f"line {number}" for number in range(200))
    out = print_texts(tmp_path, [full.replace("line 100\n", "line 7\n"), full, full[:-4]], [full] * 3, 80)
    first, same, ended = [block.split() for block in out.split("prompt ")[1:]]
    assert [first.count(word) for word in ("...", "[100]", "[7]")] == [4, 1, 1]
    assert [number for number in ("91", "92", "139", "140") if number in first] == ["92", "139"]
    assert (same.count("..."), "151" in same, "152" in same, "199" in same) == (2, False, True, True)
    assert "line[end]" in ended
