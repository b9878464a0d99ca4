"""Processes that share work by claims: every piece is done once."""

from pathlib import Path

from benchmarks.claims import measure


def test_every_piece_of_work_is_done_once(tmp_path: Path) -> None:
    seconds, done, _ = measure(tmp_path, processes=3, work=20)
    assert sorted(done) == list(range(20))
    assert seconds > 0
    assert not list(tmp_path.glob(".*"))
