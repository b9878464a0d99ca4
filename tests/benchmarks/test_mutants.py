"""Wrong lines, listed or drawn at random: they fit the code, find their tests, and are noticed or not."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.mutants import list_mutants
from benchmarks.mutations import Mutation, Trial, read_mutations
from tests.support.places import ROOT

CODE = '''"""One + one."""


def limit(value: int, least: int = 0) -> int:
    if value < least and not value == 7:
        return max(value, least) - 1
    return value
'''
WRONG = {
    "def limit(value: int, least: int = 1) -> int:",
    "    if value <= least and not value == 7:",
    "    if value < least or not value == 7:",
    "    if value < least and  value == 7:",
    "    if value < least and not value != 7:",
    "    if value < least and not value == 8:",
    "    if not (value < least and not value == 7):",
    "        return min(value, least) - 1",
    "        return max(value, least) + 1",
    "        return max(value, least) - 2",
}


def test_every_token_is_changed_in_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "kvbench" / "core").mkdir(parents=True)
    (tmp_path / "kvbench" / "core" / "limits.py").write_text(CODE)
    mutants = list(list_mutants(tmp_path, tmp_path / "kvbench" / "core" / "limits.py"))
    assert {mutant.put for mutant in mutants} == WRONG
    for mutant in mutants:
        wrong = mutant.apply(CODE)
        assert wrong is not None
        assert [
            (one, two) for one, two in zip(CODE.split("\n"), wrong.split("\n"), strict=True) if one != two
        ] == [(mutant.line, mutant.put)]


LINE = Mutation("adding.py", "a + b", "a - b", "a sum is a difference", ("test_adding.py",))


def test_every_line_is_in_its_file_once_and_names_tests_that_exist() -> None:
    lines = read_mutations()
    assert len(lines) >= 60
    assert len({(one.file, one.put) for one in lines}) == len(lines)
    for one in lines:
        assert one.apply((ROOT / one.file).read_text()) != (ROOT / one.file).read_text()
        assert all((ROOT / place).exists() for place in one.tests if place.startswith("tests/"))


@pytest.mark.parametrize(
    ("check", "put", "result"),
    [
        ("add(1, 2) == 3", "a - b", ("killed", "test_adding.py::test_add")),
        ("add(1, 0) == 1", "a - b", ("lives", "")),
    ],
)
def test_a_line_lives_if_no_test_fails(check: str, put: str, result: tuple[str, str], tmp_path: Path) -> None:
    code = "def add(a, b):\n    return a + b\n"
    (tmp_path / "adding.py").write_text(code)
    (tmp_path / "test_adding.py").write_text(
        "import logging\n\nfrom adding import add\n\n\n"
        f"def test_add():\n    logging.error('add: test_add.py:3')\n    assert {check}\n"
    )
    wrong = replace(LINE, put=put).apply(code)
    assert Trial(tmp_path, 60).try_content(tmp_path / LINE.file, wrong, LINE.tests) == result
    assert (tmp_path / "adding.py").read_text() == code
