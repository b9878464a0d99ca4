"""The cache of rows: as good as none in every state, faster, and shared."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import polars
import pytest

from kvbench.data import row_cache
from kvbench.data.frames import runs_df
from kvbench.data.row_cache import NAME, JsonRows, load_rows
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


def fresh(root: Path) -> JsonRows:
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
    assert polars.read_parquet(root / NAME).height == 7
    [path] = root.glob("*/m2-*/results.json")
    os.utime(path, ns=(0, 1))
    reads.clear()
    load_rows(root)
    assert len(reads) == 1


def test_a_file_of_another_size_and_the_same_time_is_read_again(root: Path, reads: list[str]) -> None:
    load_rows(root)
    [path] = root.glob("*/m2-*/results.json")
    time = path.stat().st_mtime_ns
    path.write_text(path.read_text() + "\n")
    os.utime(path, ns=(time, time))
    reads.clear()
    assert len(load_rows(root).texts) == 7
    assert reads == [path.parent.name]


def change_one_row(column: str, old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        rows = polars.read_parquet(content).to_dicts()
        rows[2][column] = rows[2][column].replace(old, new)
        return encode(polars.DataFrame(rows))

    return change


def encode(frame: polars.DataFrame) -> bytes:
    frame.write_parquet(buffer := io.BytesIO())
    return buffer.getvalue()


HARMS: dict[str, Callable[[bytes], bytes]] = {
    "another format": lambda _: b"no table of data " * 1000,
    "cut": lambda content: content[: len(content) // 2],
    "damaged rows": lambda content: content[:100] + b"\xff" * 500 + content[600:],
    "one value": change_one_row("text", b'"psnr', b'"qsnr'),
    "one type": change_one_row("kinds", b"float", b"text"),
    "another table": lambda _: encode(polars.DataFrame({"birds": ["wren"]})),
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_or_foreign_cache_is_made_anew(root: Path, reads: list[str], harm: str) -> None:
    expected, frame, path = load_rows(root), runs_df(root), root / NAME
    path.write_bytes(HARMS[harm](path.read_bytes()))
    assert runs_df(root).equals(frame)
    path.write_bytes(HARMS[harm](path.read_bytes()))
    reads.clear()
    assert load_rows(root) == expected
    assert len(reads) == (1 if harm.startswith("one") else 7)
    reads.clear()
    assert load_rows(root) == expected
    assert reads == []


def test_other_versions_are_made_anew(root: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load_rows(root)
    monkeypatch.setattr(row_cache, "VERSION", 1)
    assert load_rows(root) == expected
    assert len(reads) == 14


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


def test_it_works_without_a_cache(root: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load_rows(root)
    (root / NAME).unlink()
    (root / NAME).mkdir()
    assert load_rows(root) == expected
    (root / NAME / "kept").write_text("")
    assert load_rows(root) == expected
    assert len(reads) == 21
    assert (root / NAME / "kept").is_file()


PROGRAM = """
import hashlib, sys
from pathlib import Path
from kvbench.data import row_cache
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
    assert load_rows(tmp_path / "nowhere") == JsonRows([], {})
    assert list(tmp_path.iterdir()) == []
