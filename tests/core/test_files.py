"""Files appear whole or not at all, whoever writes them; hashes and paths inside packages."""

import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.core import checkpoint, files
from kvbench.core.files import resolve_path
from kvbench.eval.protocol.base import Result
from kvbench.methods.heatkv.order_file import write_orders
from kvbench.models.files import weights
from kvbench.runs.record.folder import RunFolder
from kvbench.runs.run_hash import Identity
from tests.support.places import ROOT

Writer = Callable[[Path, int], object]


def _run_file(folder: Path, version: int) -> None:
    identity = Identity({}, "", {}, None, "1", "", 0, "")
    RunFolder(folder, "m", identity).write("results.json", f"{version}")


def _converted(folder: Path, version: int) -> None:
    source = folder.parent / "model.pth"
    torch.save({"a": torch.full((3,), version)}, source)
    weights.convert(source, lambda raw: dict(raw), str(version))


WRITERS: dict[str, Writer] = {
    "harness": lambda folder, version: files.write_whole(folder / "deeper" / "a.md", f"{version}"),
    "run folder": _run_file,
    "converted weights": _converted,
    "order file": lambda folder, version: write_orders(
        folder / "orders.json", np.arange(12).reshape(3, 2, 2) % 4, 0, {"version": version}
    ),
    "result": lambda folder, version: Result(
        "psnr", "rgb", "ok", f"{version}", samples={"index": [version]}
    ).save(folder),
    "checkpoint": lambda folder, version: checkpoint.save(
        folder / "c.safetensors", {"a": torch.full((2,), float(version))}, {}
    ),
}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where writers write; converted weights go there too."""
    monkeypatch.setenv("KVBENCH_WEIGHTS", str(tmp_path / "out"))
    return tmp_path / "out"


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_old_file_and_no_litter(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = WRITERS[name]
    write(folder, 0)
    before = tree(folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space left"):
            write(folder, 1)
    assert tree(folder) == before != {}
    write(folder, 1)
    assert tree(folder) != before


def test_an_interrupted_writer_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with files.write_beside(tmp_path / "new" / "file") as beside:
            beside.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list((tmp_path / "new").iterdir()) == []


def test_hashes_are_sha256_of_the_content_and_a_folder_hashes_as_its_files_in_order(tmp_path: Path) -> None:
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2: "abc"
    assert {files.hash_content("abc"), files.hash_content("a", b"b", memoryview(b"c"))} == {known}
    (tmp_path / "b").mkdir()
    long = bytes(range(256)) * (files.CHUNK_BYTES // 256) + b"end"  # longer than a block
    for name, content in (("c", b"3"), ("b/z", long), ("a", b"1")):
        (tmp_path / name).write_bytes(content)
    assert (
        files.hash_files(sorted(p for p in tmp_path.rglob("*") if p.is_file()))
        == hashlib.sha256(b"1" + long + b"3").hexdigest()
    )
    assert files.hash_path(tmp_path / "b/z") == hashlib.sha256(long).hexdigest()


def test_seeds_are_63_bits_of_the_hash_of_a_name() -> None:
    """SHA-256 of "abc" begins with ba7816bf 8f01cfea (FIPS 180-2, B.1)."""
    assert files.derive_seed("abc") == 0xBA7816BF8F01CFEA // 2
    assert files.derive_seed("abd") != files.derive_seed("abc")


def test_settings_hash_alike_in_any_order() -> None:
    assert files.hash_values({"a": 1, "b": [Path("x")]}) == files.hash_values({"b": ["x"], "a": 1})
    assert files.hash_values({"a": 1}) != files.hash_values({"a": 2})


def test_paths_lie_in_packages_at_home_or_where_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert resolve_path("pkg://numpy/version.py") == Path(np.__file__).parent / "version.py"
    assert resolve_path("pkg://kvbench.eval/registry.py").exists()  # a folder without __init__.py
    assert resolve_path("~/a") == resolve_path("$HOME/a") == Path("/somewhere/a")
    assert resolve_path("a/b") == Path("a/b")
    assert not resolve_path("pkg://no_such_package/a").exists()
    assert not resolve_path("pkg://no_such_package.inside/a").exists()


def test_only_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    place = tmp_path / "images" / "a.png"
    die = "from os import _exit; from pathlib import Path; from kvbench.core.files import write_beside\n"
    die += f"with write_beside(Path({str(place)!r})) as beside: beside.write_text('part'); _exit(1)"
    assert subprocess.run([sys.executable, "-c", die], cwd=ROOT, check=False).returncode == 1
    [left] = tmp_path.rglob(".a.png.*")
    elsewhere = left.with_name(left.name.replace(left.name.split(".")[-1].split("-")[0], "0" * 8))
    elsewhere.write_text("part")
    with files.write_beside(place) as beside:
        beside.write_text("whole")
        files.remove_unfinished(tmp_path)
        assert set(place.parent.iterdir()) == {beside, elsewhere}
    assert place.read_text() == "whole"


def test_a_checkpoint_can_be_read_by_whoever_reads_the_folder(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    checkpoint.save(tmp_path / "tensors.safetensors", {"a": torch.ones(2)}, {})
    assert (tmp_path / "tensors.safetensors").stat().st_mode == (tmp_path / "usual").stat().st_mode
