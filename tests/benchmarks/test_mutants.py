"""Wrong lines that are listed fit the code and name tests that exist; `test_smallest` tries some."""

from benchmarks.mutations import read_mutations
from tests.support.places import ROOT


def test_every_line_is_in_its_file_once_and_names_tests_that_exist() -> None:
    lines = read_mutations()
    assert len(lines) >= 60
    assert len({(one.file, one.put) for one in lines}) == len(lines)
    for one in lines:
        assert one.apply((ROOT / one.file).read_text()) != (ROOT / one.file).read_text()
        assert all((ROOT / place).exists() for place in one.tests if place.startswith("tests/"))
