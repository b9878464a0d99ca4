"""Ceilings: nothing is larger than the last finished piece of work left it."""

from pathlib import Path

from docs.generator.ceilings import find_above, lower, measure, read_ceilings, write_ceilings

PAGE = "# Two words\n\nthree more words\n| a | table |\n\n  ```bash\n  a command\n  ```\n\n```\nx | y\n```\n"


def test_nothing_is_above_its_ceiling(root: Path) -> None:
    sizes, ceilings = measure(root), read_ceilings()
    assert find_above(sizes, ceilings) == {}, (
        "remove as much elsewhere; docs/generator/ceilings.csv has the table"
    )
    assert [*ceilings] == [*sizes]


def test_sizes_are_those_of_a_tree_made_by_hand(tmp_path: Path) -> None:
    for name, text in {
        "kvbench/__init__.py": '"""x"""\n', "kvbench/runs/x.py": "a = 1\n\n\nb = 2\n",
        "kvbench/runs/deep/y.py": "c = 3\n", "eval/x.py": "d = 4\n" * 7, "tests/x/y.py": "e = 5\n",
        "tests/x.py": "\n" * 8, "tests/docs/x/y.py": "\n",
        "tests/README.md": PAGE, "README.md": PAGE, "docs/results/x.md": PAGE, "docs/conf.py": "f = 6\n",
        "kvbench/dashboard/scripts/x.js": "g\n\n", "conf/x/y.yaml": "h: 1\ni: 2\n", "build/x.md": PAGE,
        "conf/config.yaml": "defaults:\n  - x: y\na: 1  # b: 2\nc:  # d\n  e: null\n\nhydra:\n  f: 3\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert {part: size for part, size in measure(tmp_path).items() if size} == {
        "kvbench/runs": 5, "kvbench": 1, "eval": 7, "code": 13, "Python of docs": 1,
        "tests/x": 1, "other tests": 9, "tests": 10,
        "scripts of the dashboard": 2, "lines of conf": 10, "words of Markdown": 12, "files of conf": 2,
        "keys of conf/config.yaml": 2,
    }  # fmt: skip


def test_a_program_lowers_ceilings_and_raises_none(tmp_path: Path) -> None:
    sizes = {"grown": 5, "shrunk": 2, "new": 1}
    write_ceilings(lower(sizes, {"grown": 4, "shrunk": 3, "gone": 9}), tmp_path / "ceilings.csv")
    ceilings = read_ceilings(tmp_path / "ceilings.csv")
    assert ceilings == {"grown": 4, "shrunk": 2, "new": 0}
    assert find_above(sizes, ceilings) == {"grown": 1, "new": 1}
