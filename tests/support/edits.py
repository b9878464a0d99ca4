"""Edits of a method between two equal commands; also a program: `python -m tests.support.edits`.

Each edit is made to the original files of a plugin, and the command is run again. The program prints whether samples
and scores were reused, and kills a run whose method is edited before it is run again.
"""

import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.kills import finish, start

METHOD = '''
"""A method of one's own."""
from dataclasses import dataclass

import study.ranking
from study.base import Keeper

SHIFT = 0.25


@dataclass
class Mine(Keeper):
    """Keep what ranks highest."""

    def prefer(self, ranks):
        # the newest first
        return study.ranking.scale(ranks) + SHIFT * ranks.square()
'''
BASE = """
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.methods.shared.base import Method
from study.ranking import draw


@dataclass
class Keeper(Method):
    static: ClassVar[bool] = True

    def keep(self, view):
        ranks = draw(view.position)
        ranks[view.position == 0] = 100
        best = self.prefer(ranks).topk(min(self.budget.head_tokens, ranks.shape[-1]), -1).indices
        return torch.zeros_like(ranks, dtype=torch.bool).scatter(-1, best, True)
"""
RANKING = """
from study.plain.steps import STEP


def draw(position):
    return (position * STEP % 101).float()


def scale(ranks):
    return ranks * 2


def unused(ranks):
    return ranks
"""
FILES = {
    "__init__.py": "",
    "mine.py": METHOD,
    "base.py": BASE,
    "ranking.py": RANKING,
    "plain/steps.py": "STEP = 37\n",
    "unused.py": "VALUE = 1\n",
    "conf/__init__.py": "",
    "conf/method/mine.yaml": "_target_: study.mine.Mine\n",
}
WORDS = ("method=mine", "budget=0.2", "prompts.count=2", "hydra.searchpath=[pkg://study.conf]")


@dataclass(frozen=True)
class Edit:
    """One edit of a file of the plugin.

    Attributes:
        what: a name.
        file: the file.
        old: text that is replaced.
        new: the replacement.
        counts: whether the samples must be drawn anew.
    """

    what: str
    file: str
    old: str
    new: str
    counts: bool = True


EDITS = (
    Edit("a sign", "mine.py", "+ SHIFT", "- SHIFT"),
    Edit("a constant", "mine.py", "SHIFT = 0.25", "SHIFT = -4"),
    Edit("a helper in another file", "ranking.py", "* 2", "* -2"),
    Edit("the base class", "base.py", "ranks[view.position == 0] = 100", "ranks[view.position == 1] = 100"),
    Edit("a helper of the base class", "ranking.py", "% 101", "% 11"),
    Edit(
        "an import", "base.py", "from study.ranking import draw", "from study.ranking import unused as draw"
    ),
    Edit("a comment", "mine.py", "# the newest first", "# the largest first", counts=False),
    Edit("the format", "mine.py", "SHIFT = 0.25", "SHIFT = (\n    0.25\n)", counts=False),
    Edit("a docstring", "mine.py", "ranks highest", "ranks high", counts=False),
    Edit("a function that nothing calls", "ranking.py", "    return ranks\n", "    return -ranks\n"),
    Edit("a helper in a plain folder", "plain/steps.py", "STEP = 37", "STEP = 41"),
    Edit("a module that nothing imports", "unused.py", "1", "2", counts=False),
)


@dataclass(frozen=True)
class Effect:
    """What an edit led to: name of the run, whether it existed before, and the lines of the command that name code."""

    edit: Edit
    run: str
    reused: bool
    lines: tuple[str, ...]


def write_plugin(folder: Path, edit: Edit | None = None) -> None:
    """Write the plugin's files, with an edit if there is one."""
    for name, text in FILES.items():
        path = folder / "study" / name
        if edit is not None and edit.file == name:
            assert text.count(edit.old) == 1, edit
            text = text.replace(edit.old, edit.new)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip("\n"))


def run(folder: Path, *more: str) -> tuple[str, bool, tuple[str, ...]]:
    """Run the command to its end; returns the run's name, whether it was found, and the lines that name code."""
    (folder / "log").unlink(missing_ok=True)
    assert finish(start(folder, [*WORDS, *more])) == 0, (folder / "log").read_text()
    log = (folder / "log").read_text()
    last = next(line for line in reversed(log.splitlines()) if "/mine-" in line)
    return Path(last.split()[-1]).name, "found" in last, tuple(x for x in log.splitlines() if "code" in x)


def try_edits(folder: Path) -> list[Effect]:
    """Run the command once, and again after each edit."""
    write_plugin(folder)
    run(folder)
    effects = []
    for edit in EDITS:
        write_plugin(folder, edit)
        effects.append(Effect(edit, *run(folder)))
    return effects


def resume_across(folder: Path, edit: Edit, count: int = 6) -> tuple[str, str, int]:
    """Kill a run after two samples, edit its method and run it again.

    Returns:
        Names of the killed run and of the new one, and the number of samples that the killed run keeps.
    """
    write_plugin(folder)
    words = (f"prompts.count={count}", "batch_size=1", "runs_dir=killed")
    child = start(folder, [*WORDS, *words])
    while not (
        paths := [p for p in folder.glob("killed/*/mine-*/samples.jsonl") if p.read_text().count("\n") > 1]
    ):
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    finish(child)
    kept = paths[0].read_text().count("\n")
    write_plugin(folder, edit)
    name, reused, _ = run(folder, *words)
    assert not reused
    assert kept == paths[0].read_text().count("\n") < count
    return paths[0].parent.name, name, kept


def main() -> None:
    """Print the effect of each edit."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sys.path.insert(0, name)
        for effect in try_edits(folder):
            state = "found" if effect.reused else "made anew"
            print(f"{effect.edit.what:32} {state:10} {effect.run}", *effect.lines, sep="\n    ")
        print("killed, edited, run again:", *resume_across(folder, EDITS[0]))


if __name__ == "__main__":
    main()
