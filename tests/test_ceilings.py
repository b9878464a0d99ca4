"""Ceilings: nothing is larger than the last finished piece of work left it."""

from pathlib import Path

from docs.generator.ceilings import find_above, lower, measure, read_ceilings, write_ceilings


def test_nothing_is_above_its_ceiling(root: Path) -> None:
    sizes, ceilings = measure(root), read_ceilings()
    assert find_above(sizes, ceilings) == {}, (
        "remove as much elsewhere; docs/generator/ceilings.csv has the table"
    )
    assert [*ceilings] == [*sizes]


def test_a_program_lowers_ceilings_and_raises_none(tmp_path: Path) -> None:
    sizes = {"grown": 5, "shrunk": 2, "new": 1}
    write_ceilings(lower(sizes, {"grown": 4, "shrunk": 3, "gone": 9}), tmp_path / "ceilings.csv")
    ceilings = read_ceilings(tmp_path / "ceilings.csv")
    assert ceilings == {"grown": 4, "shrunk": 2, "new": 0}
    assert find_above(sizes, ceilings) == {"grown": 1, "new": 1}
