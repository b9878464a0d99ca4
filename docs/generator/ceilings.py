"""Ceilings: how large each part of the checkout is, and how large it may be.

ceilings.csv has the sizes at the end of the last finished piece of work. A test compares the tree with it, and
`make rooms` prints both. `python docs/generator/ceilings.py --lower` writes the sizes that are smaller today. Nothing
here writes a larger one on a command: whoever needs room edits the file, and removes as much elsewhere.
"""

import argparse
import csv
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "docs" / "generated"
TABLE = ROOT / "docs" / "generator" / "ceilings.csv"
CODE = ("kvbench", "eval", "kernels", "benchmarks")
"""Trees whose lines of Python count as code."""
SMALL = {"cuda_branches", "cuda_shapes", "docs"}
"""Folders of tests that have one ceiling with the files beside them."""
PAGES = ("*.md", ".github/*.md", *(f"{tree}/**/*.md" for tree in ("docs", *CODE, "conf", "notebooks")))
"""Markdown files outside tests."""
OTHERS = {
    "Python of docs": ("docs/**/*.py",),
    "Python of notebooks": ("notebooks/*.py",),
    "scripts of the dashboard": ("kvbench/dashboard/scripts/*",),
    "styles of the dashboard": ("kvbench/dashboard/styles/*",),
    "templates of the dashboard": ("kvbench/dashboard/templates/*",),
    "lines of conf": ("conf/**/*.yaml",),
}
"""Files whose lines are counted beside the code's."""
BLOCK = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
"""A block of code of a Markdown page."""
KEY = re.compile(r"^ *\w+: +[^\s#]", re.MULTILINE)
"""A key of config.yaml with its value."""


def list_files(root: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files that match one of the patterns, sorted, without pages that `make docs` generates."""
    found = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
    return sorted(path for path in found if GENERATED not in path.parents)


def count_lines(paths: Iterable[Path]) -> int:
    """Return the lines of files, blank ones included."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def count_words(text: str) -> int:
    """Return the words of a Markdown text outside tables and blocks of code."""
    return sum(len(line.split()) for line in BLOCK.sub("", text).splitlines() if line.lstrip()[:1] != "|")


def count_keys(text: str) -> int:
    """Count the keys of config.yaml that have a value; keys of Hydra do not count."""
    return len(KEY.findall(text.partition("\nhydra:")[0]))


def measure(root: Path = ROOT) -> dict[str, int]:
    """Return the size of every part: lines of Python by tree, package and folder of tests, words, files and keys."""
    packages = sorted({path.relative_to(root).parts[1] for path in root.glob("kvbench/*/**/*.py")})
    parts = {f"kvbench/{name}": (f"kvbench/{name}/**/*.py",) for name in packages}
    parts |= {"kvbench": ("kvbench/*.py",)} | {tree: (f"{tree}/**/*.py",) for tree in CODE[1:]}
    sizes = {name: count_lines(list_files(root, patterns)) for name, patterns in parts.items()}
    sizes["code"] = sum(sizes.values())
    rooms = sorted({path.relative_to(root).parts[1] for path in root.glob("tests/*/**/*.py")} - SMALL)
    tests = {f"tests/{name}": (f"tests/{name}/**/*.py",) for name in rooms}
    tests["other tests"] = ("tests/*.py", *(f"tests/{name}/**/*.py" for name in SMALL))
    sizes |= {name: count_lines(list_files(root, patterns)) for name, patterns in tests.items()}
    sizes["tests"] = sum(sizes[name] for name in tests)
    sizes |= {name: count_lines(list_files(root, patterns)) for name, patterns in OTHERS.items()}
    sizes["words of Markdown"] = sum(count_words(path.read_text()) for path in list_files(root, PAGES))
    sizes["files of conf"] = len(list_files(root, ("conf/**/*.yaml", "conf/**/*.py")))
    sizes["keys of conf/config.yaml"] = count_keys((root / "conf" / "config.yaml").read_text())
    return sizes


def read_ceilings(path: Path = TABLE) -> dict[str, int]:
    """Return the largest size that each part may have."""
    with path.open(newline="") as file:
        return {row["part"]: int(row["ceiling"]) for row in csv.DictReader(file)}


def write_ceilings(sizes: Mapping[str, int], path: Path = TABLE) -> None:
    """Write sizes as the ceilings; at the end of a piece of work, `write_ceilings(measure())` sets them."""
    path.write_text("".join(f"{part},{size}\n" for part, size in [("part", "ceiling"), *sizes.items()]))


def lower(sizes: Mapping[str, int], ceilings: Mapping[str, int]) -> dict[str, int]:
    """Return ceilings of the parts that are measured, none above its size today or its earlier ceiling."""
    return {part: min(size, ceilings.get(part, 0)) for part, size in sizes.items()}


def find_above(sizes: Mapping[str, int], ceilings: Mapping[str, int]) -> dict[str, int]:
    """Return by how much parts are above their ceilings; the ceiling of a part that is not listed is 0."""
    return {part: over for part, size in sizes.items() if (over := size - ceilings.get(part, 0)) > 0}


def describe(sizes: Mapping[str, int], ceilings: Mapping[str, int]) -> str:
    """Return the text that `make rooms` prints: every part today beside its ceiling."""
    above = find_above(sizes, ceilings)
    lines = [f"{'lines, words, files, keys':<26} {'today':>7} {'ceiling':>7}"]
    for part, size in sizes.items():
        mark = f"  {above[part]} above" if part in above else ""
        lines.append(f"{part:<26} {size:>7} {ceilings.get(part, 0):>7}{mark}")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lower", action="store_true", help="write the sizes that are smaller today")
    if parser.parse_args().lower:
        write_ceilings(lower(measure(), read_ceilings()))
    print(describe(measure(), read_ceilings()))
