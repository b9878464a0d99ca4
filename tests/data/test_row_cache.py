"""The cache of rows: as good as none in every state, faster, and shared."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.data import row_cache
from kvbench.data.row_cache import NAME, Lines, load_rows
from tests.data.test_frames import write
from tests.support.results import PSNR, made_up


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, *(made_up(f"m{n}", 0.1, {"psnr": PSNR}, model=f"model{n % 2}") for n in range(7)))
    return tmp_path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders whose results were read."""
    seen: list[str] = []
    real = row_cache.read_results

    def read(folder: Path) -> object:
        seen.append(folder.name)
        return real(folder)

    monkeypatch.setattr(row_cache, "read_results", read)
    return seen


def fresh(root: Path) -> Lines:
    (root / NAME).unlink(missing_ok=True)
    return load_rows(root)


def test_what_did_not_change_is_not_read_again(root: Path, reads: list[str]) -> None:
    first = load_rows(root)
    assert len(first.texts) == len(reads) == 7
    assert load_rows(root) == first
    assert len(reads) == 7


def test_what_changed_is(root: Path, reads: list[str]) -> None:
    load_rows(root)
    write(root, made_up("m3", 0.1, {}, model="model1", n=5), made_up("new", 0.1, {}))
    [gone] = (root / "model0").glob("m0-*")
    (gone / "results.json").unlink()
    reads.clear()
    found = load_rows(root)
    assert sorted(name.partition("-")[0] for name in reads) == ["m3", "new"]
    assert found == fresh(root)
    with sqlite3.connect(root / NAME) as base:
        assert base.execute("SELECT count(*) FROM rows").fetchone() == (7,)


def test_a_time_of_its_own_is_enough(root: Path, reads: list[str]) -> None:
    load_rows(root)
    [path] = root.glob("*/m2-*/results.json")
    os.utime(path, ns=(0, 1))
    reads.clear()
    load_rows(root)
    assert len(reads) == 1


def overwrite_all(path: Path) -> None:
    path.write_bytes(b"no base of data " * 1000)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def overwrite_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for start in range(4096, len(content), 4096):
        content[start : start + 100] = b"\xff" * 100
    path.write_bytes(content)


def change_letters(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"psnr', b'"qsnr').replace(b"infinity", b"infinite"))


def be_foreign(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE birds (name TEXT)")


def be_older(path: Path) -> None:
    with sqlite3.connect(path) as base:
        base.execute("PRAGMA user_version = 1")
        base.execute("UPDATE rows SET size = size")
    path.write_bytes(path.read_bytes().replace(b'"psnr', b'"qsnr'))


def be_empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "harm", [overwrite_all, cut, overwrite_middle, change_letters, be_foreign, be_older, be_empty]
)
def test_a_cache_that_is_damaged_or_foreign_is_made_anew(
    root: Path, reads: list[str], harm: Callable[[Path], None]
) -> None:
    expected = load_rows(root)
    harm(root / NAME)
    reads.clear()
    assert load_rows(root) == expected
    assert reads
    reads.clear()
    assert load_rows(root) == expected
    assert reads == []


def test_where_nothing_can_be_written_the_user_has_a_cache(
    root: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    caches = tmp_path_factory.mktemp("caches")
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches))
    monkeypatch.setattr(row_cache, "find_obstacle", lambda folder: "no permission")
    first = load_rows(root)
    assert load_rows(root) == first
    assert len(reads) == 7
    assert not (root / NAME).exists()
    assert len(list((caches / "kvbench").iterdir())) == 1


def test_where_no_cache_can_be_it_goes_without(
    root: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load_rows(root)
    (root / NAME).unlink()
    (root / NAME).mkdir()
    assert load_rows(root) == expected
    (root / NAME / "kept").write_text("")
    assert load_rows(root) == expected
    assert len(reads) == 21
    assert (root / NAME / "kept").is_file()


def test_a_cache_that_another_process_holds_is_waited_for_and_left_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load_rows(root)
    write(root, made_up("m3", 0.1, {}, model="model1", n=5))
    monkeypatch.setattr(row_cache, "PATIENCE", 0.05)
    other = sqlite3.connect(root / NAME, isolation_level=None)
    for lock in ("IMMEDIATE", "EXCLUSIVE"):
        other.execute(f"BEGIN {lock}")
        assert load_rows(root) != expected
        other.execute("ROLLBACK")
    other.close()
    assert load_rows(root) == fresh(root)


PROGRAM = """
import hashlib, sys
from pathlib import Path
from kvbench.data import row_cache
row_cache.BATCH = 3
for _ in range(5):
    found = row_cache.load_rows(Path(sys.argv[1]))
print(hashlib.sha256(b"".join(found.texts)).hexdigest(), len(found.texts))
"""


def test_processes_share_it(root: Path) -> None:
    write(root, *(made_up(f"more{n}", 0.2, {"psnr": PSNR}) for n in range(40)))
    command = [sys.executable, "-c", PROGRAM, str(root)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    told = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert len(set(told)) == 1
    assert told[0].split()[1] == "47"


def test_no_folder_is_made(tmp_path: Path) -> None:
    assert load_rows(tmp_path / "nowhere") == Lines([], {})
    assert list(tmp_path.iterdir()) == []
