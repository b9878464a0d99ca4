"""Random wrong tokens that tests must notice: comparisons, + and -, numbers, not, and, or, min, max, branches.

python -m benchmarks mutants [--rooms core report] [--seed 0] [--count 30] [--out FILE] [--again FILE]
A room is a folder of `kvbench`, or `eval`, `kernels`, `benchmarks`. Each mutant changes one token of a line in a copy
of the checkout. pytest runs fast tests in files named after its file, then fast tests of the room, to the first
failure. A mutant is `killed`, `hangs` (which counts as killed), `lives`, or is `gone` if `--again` names a line that no
file has now. Some mutants that live change no behaviour, and tests of other rooms may kill mutants that live in their
own.
"""

import argparse
import ast
import random
import tempfile
import time
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from io import StringIO
from itertools import islice
from math import ceil
from pathlib import Path

from benchmarks.mutations import Trial, copy_checkout
from benchmarks.support.arguments import Option
from benchmarks.support.build import ROOT
from benchmarks.support.table import read_csv, write_csv

OPTIONS = {
    "rooms": Option([""], "rooms by name; all by default"),
    "seed": Option(0, "seed of the sample of mutants"),
    "per_thousand": Option(4.0, "mutants of a room per 1000 lines of its code"),
    "most": Option(40, "maximum mutants of a room"),
    "count": Option(0, "mutants of all rooms together, sampled from these; 0 for all"),
    "out": Option(None, "CSV of the mutants and their results; an existing file is continued"),
    "again": Option(None, "CSV of an earlier run, whose mutants are tried again by the text of their lines"),
    "timeout": Option(300, "seconds after which tests are stopped"),
}
TREES = ("eval", "kernels", "benchmarks")
SWAPPED = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "+=": "-=", "-=": "+=",
    "and": "or", "or": "and", "min": "max", "max": "min", "True": "False", "False": "True", "not": "",
}  # fmt: skip
"""Wrong tokens by the right ones; a whole number becomes the next one."""


@dataclass(frozen=True)
class Mutant:
    """A wrong line.

    Attributes:
        file: path within the checkout.
        line: text of the right line.
        copy: index of that line among equal lines of the file, from 0.
        put: text of the wrong line.
    """

    file: str
    line: str
    copy: int
    put: str

    @property
    def room(self) -> str:
        """First folder of the code below kvbench, or the folder beside it, by which tests are found."""
        parts = Path(self.file).parts
        return parts[0] if parts[0] in TREES else parts[1] if len(parts) > 2 else "kvbench"

    def apply(self, content: str) -> str | None:
        """Return the file's content with the wrong line; None if it lacks the right line."""
        lines = content.split("\n")
        equal = [index for index, line in enumerate(lines) if line == self.line]
        if len(equal) <= self.copy:
            return None
        lines[equal[self.copy]] = self.put
        return "\n".join(lines)

    def list_tests(self, root: Path) -> list[Path]:
        """Return the tests of a mutant: files named after its file, then the test folder of its room."""
        folder = root / "tests" / ("" if self.room == "kvbench" else self.room)
        if not folder.is_dir():
            return []
        own = sorted(folder.rglob(f"test_{Path(self.file).stem}.py"))
        return [*own, folder] if self.room != "kvbench" else sorted({*own, *folder.glob("test_*.py")})


def list_mutants(root: Path, file: Path) -> Iterator[Mutant]:
    """Yield all mutants of a file, including those that cannot be compiled."""
    content = file.read_text(encoding="utf-8")
    lines = content.split("\n")
    for number, start, end, text in sorted(_list_edits(content)):
        line = lines[number]
        put = line[:start] + text + line[end:]
        yield Mutant(str(file.relative_to(root)), line, lines[:number].count(line), put)


def can_compile(root: Path, mutant: Mutant) -> bool:
    """Return whether the file with the wrong line is Python."""
    content = mutant.apply((root / mutant.file).read_text(encoding="utf-8"))
    try:
        compile(content or "", mutant.file, "exec")
    except SyntaxError:
        return False
    return True


def _list_edits(content: str) -> Iterator[tuple[int, int, int, str]]:
    """Yield line (from 0), first and last column and the new text of every edit."""
    depth = 0
    for token in tokenize.generate_tokens(StringIO(content).readline):
        name = tokenize.tok_name[token.type]
        depth += (name == "FSTRING_START") - (name == "FSTRING_END")
        (row, start), (_, end) = token.start, token.end
        if depth or "revision" in token.line:
            continue
        if name in ("OP", "NAME") and token.string in SWAPPED:
            yield row - 1, start, end, SWAPPED[token.string]
        elif name == "NUMBER" and token.string.isdecimal():
            yield row - 1, start, end, str(int(token.string) + 1)
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.If | ast.IfExp | ast.While) and node.test.lineno == node.test.end_lineno:
            line = content.split("\n")[node.test.lineno - 1].encode()  # `ast` counts columns in bytes
            start, end = (
                len(line[:at].decode()) for at in (node.test.col_offset, node.test.end_col_offset or 0)
            )
            yield node.test.lineno - 1, start, end, f"not ({line.decode()[start:end]})"


def draw_mutants(root: Path, seed: int, per_thousand: float, most: int) -> list[Mutant]:
    """Sample the mutants of each room by the seed; equal code and seed give equal mutants."""
    rooms: dict[str, list[Path]] = {}
    for tree in ("kvbench", *TREES):
        for file in sorted((root / tree).rglob("*.py")):
            rooms.setdefault(Mutant(str(file.relative_to(root)), "", 0, "").room, []).append(file)
    drawn: list[Mutant] = []
    for room, files in sorted(rooms.items()):
        candidates = [mutant for file in files for mutant in list_mutants(root, file)]
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        random.Random(f"{seed} {room}").shuffle(candidates)
        fitting = (mutant for mutant in candidates if can_compile(root, mutant))
        drawn += islice(fitting, min(most, ceil(lines * per_thousand / 1000)))
    return drawn


def find_line(root: Path, mutant: Mutant) -> Mutant:
    """Return the mutant, moved to the only other file with its line if its own file has lost it."""
    path = root / mutant.file
    if path.is_file() and mutant.apply(path.read_text(encoding="utf-8")) is not None:
        return mutant
    others = [
        file
        for tree in ("kvbench", *TREES)
        for file in (root / tree).rglob("*.py")
        if mutant.line in file.read_text(encoding="utf-8").split("\n")
    ]
    return replace(mutant, file=str(others[0].relative_to(root)), copy=0) if len(others) == 1 else mutant


def try_mutant(trial: Trial, copy: Path, mutant: Mutant) -> str:
    """Return the result of a mutant in a copy of the checkout."""
    path = copy / mutant.file
    wrong = mutant.apply(path.read_text(encoding="utf-8")) if path.is_file() else None
    if wrong is None:
        return "gone"
    for tests in mutant.list_tests(copy):
        result, _ = trial.try_content(path, wrong, [str(tests.relative_to(copy))])
        if result != "lives":
            return result
    return "lives"


def read_results(path: Path) -> dict[Mutant, str]:
    """Return the results of a CSV file by mutant, in its order; empty if there is no file."""
    if not path.is_file():
        return {}
    return {
        Mutant(row["file"], row["line"], int(row["copy"]), row["put"]): row["result"]
        for row in read_csv(path)
    }


def main(options: argparse.Namespace) -> int:
    """Print a row per mutant and the kills per room; the exit status is 0.

    Raises:
        ValueError: no mutant is chosen, or `--again` names no file of mutants.
    """
    if options.again:
        drawn: Sequence[Mutant] = list(read_results(Path(options.again)))
    else:
        drawn = draw_mutants(ROOT, options.seed, options.per_thousand, options.most)
    chosen = [mutant for mutant in drawn if any(mutant.room.startswith(room) for room in options.rooms)]
    if options.count:
        chosen = random.Random(options.seed).sample(chosen, min(options.count, len(chosen)))
    if not chosen:
        raise ValueError(f"--rooms {' '.join(options.rooms)} --again {options.again}: no mutant matches")
    results = read_results(Path(options.out)) if options.out else {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        copy_checkout(copy)
        trial = Trial(copy, options.timeout)
        for mutant in chosen:
            if mutant not in results:
                started = time.monotonic()
                results[mutant] = try_mutant(trial, copy, find_line(copy, mutant))
                seconds = time.monotonic() - started
                print(f"{results[mutant]:7}{seconds:5.0f} s  {mutant.file}: {mutant.put.strip()}", flush=True)
                if options.out:
                    write_results(Path(options.out), results)
    counts = Counter((mutant.room, results[mutant]) for mutant in chosen)
    for room in sorted({mutant.room for mutant in chosen}):
        tried = sum(count for (name, result), count in counts.items() if name == room and result != "gone")
        print(f"{room:12} {counts[room, 'killed'] + counts[room, 'hangs']:3} of {tried:3} killed")
    return 0


def write_results(path: Path, results: dict[Mutant, str]) -> None:
    """Write mutants and their results as a CSV file."""
    rows = ([*map(str, astuple(mutant)), result] for mutant, result in results.items())
    write_csv(str(path), [[*(field.name for field in fields(Mutant)), "result"], *rows])
