"""Processes that share work by claims do every piece once."""

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.claims import measure


def test_every_piece_of_work_is_done_once(tmp_path: Path) -> None:
    seconds, done, _ = measure(tmp_path, processes=3, work=20)
    assert sorted(done) == list(range(20))
    assert seconds > 0
    assert not list(tmp_path.glob(".*"))


def test_a_row_is_printed_for_each_number_of_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", "--processes", "1", "2", "--work", "5"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(row[0], *row[3:]) for row in rows] == [("1", "0", "0"), ("2", "0", "0")]
