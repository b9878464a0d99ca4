"""The list of wrong lines fits the code, and the program tells whether tests notice one."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.mutations import Mutation, Trial, read_mutations
from tests.support.places import ROOT

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
        ("add(1, 2) == 3", "a +", ("broken", "")),
        ("add(1, 2) == 4", "a - b", ("broken", "test_adding.py::test_add")),
    ],
)
def test_a_line_lives_if_no_test_fails(check: str, put: str, result: tuple[str, str], tmp_path: Path) -> None:
    code = "def add(a, b):\n    return a + b\n"
    (tmp_path / "adding.py").write_text(code)
    (tmp_path / "test_adding.py").write_text(
        f"from adding import add\n\n\ndef test_add():\n    assert {check}\n"
    )
    wrong = replace(LINE, put=put).apply(code)
    assert Trial(tmp_path, 60).try_content(tmp_path / LINE.file, wrong, LINE.tests) == result
    assert (tmp_path / "adding.py").read_text() == code


def test_a_text_that_is_not_there_or_twice_is_refused() -> None:
    for content in ("a", "a + b, a + b"):
        with pytest.raises(ValueError, match=r"mutations.yaml: adding.py has 'a \+ b' [02] times"):
            LINE.apply(content)
