"""Random mutants change one token of a line, find their tests, and are found again by the text of their line."""

from pathlib import Path

import pytest

from benchmarks.mutants import Mutant, draw_mutants, find_line, list_mutants, read_results, write_results

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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "kvbench" / "core").mkdir(parents=True)
    (tmp_path / "kvbench" / "core" / "limits.py").write_text(CODE)
    (tmp_path / "tests" / "core" / "inner").mkdir(parents=True)
    (tmp_path / "tests" / "core" / "inner" / "test_limits.py").touch()
    return tmp_path


def test_every_token_is_changed_in_a_line_of_its_own(checkout: Path) -> None:
    mutants = list(list_mutants(checkout, checkout / "kvbench" / "core" / "limits.py"))
    assert {mutant.put for mutant in mutants} == WRONG
    for mutant in mutants:
        wrong = mutant.apply(CODE)
        assert wrong is not None
        assert [
            (one, two) for one, two in zip(CODE.split("\n"), wrong.split("\n"), strict=True) if one != two
        ] == [(mutant.line, mutant.put)]


def test_a_seed_draws_the_same_mutants_of_each_room(checkout: Path) -> None:
    drawn = draw_mutants(checkout, 1, 400, 40)
    assert len(drawn) == 3  # 7 lines
    assert drawn == draw_mutants(checkout, 1, 400, 40) != draw_mutants(checkout, 2, 400, 40)
    assert len(draw_mutants(checkout, 1, 4000, 5)) == 5
    assert {mutant.room for mutant in drawn} == {"core"}
    folder = checkout / "tests" / "core"
    assert drawn[0].list_tests(checkout) == [folder / "inner" / "test_limits.py", folder]


def test_a_line_is_found_where_it_was_moved(checkout: Path) -> None:
    mutant = Mutant("kvbench/core/limits.py", "    return value", 0, "    return not value")
    assert find_line(checkout, mutant) == mutant
    (checkout / "eval").mkdir()
    (checkout / "kvbench" / "core" / "limits.py").rename(checkout / "eval" / "moved.py")
    assert find_line(checkout, mutant).file == "eval/moved.py"
    (checkout / "eval" / "twice.py").write_text(CODE)
    assert find_line(checkout, mutant) == mutant
    assert mutant.apply("nothing") is None


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    results = {Mutant("a.py", 'x = "1, 2"', 1, "x"): "lives", Mutant("b.py", "y", 0, "z"): "killed"}
    write_results(tmp_path / "out.csv", results)
    assert read_results(tmp_path / "out.csv") == results
    assert read_results(tmp_path / "none.csv") == {}
