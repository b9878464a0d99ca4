"""Hashes of reference files: read once, and again after any change (tests/core/test_kept.py has the rules)."""

import hashlib
import os
from pathlib import Path

import pytest

from kvbench.eval.files import digests
from kvbench.eval.files.digests import digest_path, hash_files_at

NAMES = ("a.png", "b.png", "c.png")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settled: None) -> Path:
    """A folder of files whose hashes are kept at once, however small and new they are."""
    monkeypatch.setenv("KVBENCH_FEATURES", str(tmp_path / "store"))
    monkeypatch.setattr(digests, "MIN_BYTES", 0)
    folder = tmp_path / "real"
    (folder / "below").mkdir(parents=True)
    for name in (*NAMES, ".hidden", "below/d.png"):
        (folder / name).write_text(f"content of {name}")
    return folder


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read."""
    names: list[str] = []
    hash_path = digests.hash_path
    monkeypatch.setattr(digests, "hash_path", lambda path: names.append(path.name) or hash_path(path))
    return names


def expected(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != ".hidden"
    }


def test_files_are_read_once(folder: Path, read: list[str]) -> None:
    assert hash_files_at(folder) == expected(folder)
    assert sorted(read) == [*NAMES]
    assert hash_files_at(folder) == expected(folder)
    assert len(read) == len(NAMES)
    assert hash_files_at(folder / "a.png") == {"a.png": expected(folder)["a.png"]}
    assert digest_path(folder) != digest_path(folder / "a.png")


def test_another_file_of_equal_size_and_time_is_read_again(folder: Path, read: list[str]) -> None:
    before = digest_path(folder)
    read.clear()
    path, other = folder / "b.png", folder / ".other"
    times = path.stat()
    other.write_bytes(path.read_bytes()[::-1])
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(path)
    assert hash_files_at(folder) == expected(folder)
    assert read == ["b.png"]
    assert digest_path(folder) != before


def test_names_count(folder: Path, read: list[str]) -> None:
    before = digest_path(folder)
    read.clear()
    (folder / "c.png").rename(folder / "e.png")
    renamed = digest_path(folder)
    (folder / "a.png").unlink()
    assert len({before, renamed, digest_path(folder)}) == 3
    assert hash_files_at(folder) == expected(folder)
    assert read == ["e.png"]


def test_without_a_place_for_hashes_files_are_read_each_time(
    folder: Path, read: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (folder.parent / "store").write_text("not a folder")
    assert hash_files_at(folder) == hash_files_at(folder) == expected(folder)
    assert len(read) == 2 * len(NAMES)
    assert "the next call reads files again" in caplog.text


def test_what_cannot_be_read_is_an_error(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        digest_path(folder / "nowhere")
    (folder / "broken.png").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match=r"broken\.png"):
        digest_path(folder)
