"""Values that a file keeps between commands."""

import os
from pathlib import Path

import pytest

from kvbench.core import kept
from kvbench.core.kept import FileCache


@pytest.fixture
def source(tmp_path: Path, settled: None) -> Path:
    path = tmp_path / "source"
    path.write_text("one")
    return path


def look(tmp_path: Path, source: Path, made: list[str], version: str = "1", name: str = "name") -> object:
    """A command: read the file of kept values, take one, write it."""
    kept = FileCache(tmp_path / "kept", version)
    value = kept.get(
        name, [source, tmp_path / "absent"], lambda: made.append(name) or {"text": source.read_text()}
    )
    kept.save()
    return value


def test_a_value_is_made_once_until_its_file_changes(tmp_path: Path, source: Path) -> None:
    made: list[str] = []
    assert [look(tmp_path, source, made) for _ in range(2)] == [{"text": "one"}] * 2
    assert len(made) == 1
    before = source.stat()
    source.write_text("two")  # as long as before, and put back to the time of before
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert look(tmp_path, source, made) == {"text": "two"}
    (tmp_path / "absent").touch()
    look(tmp_path, source, made)
    assert len(made) == 3


def test_other_versions_and_damage_are_made_again(tmp_path: Path, source: Path) -> None:
    made: list[str] = []
    look(tmp_path, source, made)
    look(tmp_path, source, made, version="2")
    assert len(made) == 2
    whole = (tmp_path / "kept").read_bytes()
    for place in range(0, len(whole), 7):
        (tmp_path / "kept").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert look(tmp_path, source, made, version="2") == {"text": "one"}
        (tmp_path / "kept").write_bytes(whole[:place])
        assert look(tmp_path, source, made, version="2") == {"text": "one"}


def test_what_is_not_asked_for_is_dropped_unless_it_is_current(tmp_path: Path, source: Path) -> None:
    made: list[str] = []
    for name in ("a", "b", "c"):
        look(tmp_path, source, made, name=name)
    assert made == ["a", "b", "c"]
    look(tmp_path, source, made, name="b")
    kept = FileCache(tmp_path / "kept", "1")
    kept.get("d", (), lambda: 1)
    kept.save(lambda name: name == "b")
    look(tmp_path, source, made, name="b")
    assert made == ["a", "b", "c", "b"]


def test_a_file_that_just_changed_may_change_again(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "TICK", 10**12)
    made: list[str] = []
    for _ in range(2):
        look(tmp_path, source, made)
    assert len(made) == 2


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path, source: Path) -> None:
    made: list[str] = []
    (tmp_path / "kept").mkdir()
    assert look(tmp_path, source, made) == {"text": "one"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
