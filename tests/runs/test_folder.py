"""Run folders: identity, records that belong to their images, whole files, two writers."""

import json
import multiprocessing
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kvbench.core.config import ConfigError
from kvbench.core.files import name_sample, parse_json
from kvbench.eval.files.image_folder import PlainFolder
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.samples import SampleSetError
from kvbench.runs.record.folder import RunFolder, RunName, blocks
from kvbench.runs.record.merge import merge_run
from kvbench.runs.run_hash import Identity

IDENTITY = Identity(
    {}, "a" * 64, {"_target_": "HeatKV"}, None, "1", "c" * 64, 0, "float32", label="heatkv-0.04"
)


def test_a_folder_of_before_is_found_by_its_hash(tmp_path: Path) -> None:
    """Labels once had the budget's share where tokens were given."""
    before = RunFolder(tmp_path, "model", replace(IDENTITY, label="h2o-0.1988"))
    assert RunFolder(tmp_path, "model", replace(IDENTITY, label="h2o-128")).path == before.path
    assert RunName.of(before.path.name) == ("h2o-0.1988", IDENTITY.hash)


def images(indices: list[int], shade: int = 0) -> np.ndarray:
    return np.stack([np.full((4, 6, 3), (index * 7 + shade) % 256, np.uint8) for index in indices])


def records(indices: list[int], **more: object) -> list[dict[str, object]]:
    return [{"index": index, "seed": 0, "prompt": f"p{index}", "meta": {}, **more} for index in indices]


def test_samples_are_those_whose_image_is_the_recorded_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "m", IDENTITY)
    folder.add(records([0, 1, 2]), images([0, 1, 2]))
    assert sorted(folder.samples()) == [0, 1, 2]
    assert np.array_equal(np.array(Image.open(folder.path / "images/000002.png")), images([2])[0])
    (folder.path / "images/000001.png").write_bytes(b"truncated")
    (folder.path / "images/000002.png").unlink()
    assert sorted(folder.samples()) == [0]
    with pytest.raises(RuntimeError, match="2 samples are missing, the first is 1"):
        folder.tidy([0, 1, 2])
    folder.add(records([0, 1, 2]), images([0, 1, 2]))
    assert [record["index"] for record in folder.tidy([0, 1, 2])] == [0, 1, 2]


def test_no_folder_of_a_hundred_thousand_samples_has_more_than_a_thousand_entries(tmp_path: Path) -> None:
    names = [name_sample(index, ".png") for index in range(100_000)]
    assert len(set(names)) == 100_000
    files = Counter(name.rpartition("/")[0] for name in names)
    assert max(files.values()) <= 1000
    assert files[""] + len(files) - 1 <= 1000  # beside its files, the folder of all has the others
    assert not any("/" in folder for folder in files)
    folder, indices = RunFolder(tmp_path, "m", IDENTITY), [0, 499, 500, 501, 1731, 99_999]
    folder.add(records(indices), images(indices))
    assert sorted(folder.samples()) == indices
    found = {str(path.relative_to(folder.path / "images")) for path in folder.path.rglob("*.png")}
    assert found == {names[index] for index in indices}
    folder.tidy(indices)
    opened = ImageSet(folder.path)
    assert np.array_equal(opened.stack(indices), images(indices))
    assert np.array_equal(PlainFolder(folder.path).stack(range(6)), images(indices))
    assert merge_run(folder.path, tmp_path / "elsewhere").added == 6
    assert ImageSet(tmp_path / "elsewhere/m" / folder.path.name).digest == opened.digest
    (folder.path / "images/001500/001732.png").touch()
    with pytest.raises(SampleSetError, match=r"images not in samples\.jsonl: 001500/001732\.png"):
        ImageSet(folder.path)


def test_torn_end_of_the_records_is_cut_off(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "m", IDENTITY)
    folder.add(records([0, 1]), images([0, 1]))
    path = folder.path / "samples.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"index": 2, "sha2')
    assert sorted(folder.samples()) == [0, 1]
    folder.add(records([2]), images([2]))
    lines = path.read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1, 2]


def test_only_new_lines_of_another_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = RunFolder(tmp_path, "m", IDENTITY), RunFolder(tmp_path, "m", IDENTITY)
    parsed: list[int] = []

    def note(line: bytes, **options: bool) -> object:
        parsed.append(json.loads(line)["index"])
        return parse_json(line, **options)

    monkeypatch.setattr("kvbench.runs.record.folder.parse_json", note)
    for start in range(0, 8, 2):
        writer.add(records([start, start + 1]), images([start, start + 1]))
        assert len(reader.samples()) == start + 2
    assert parsed == list(range(8))
    writer.tidy(range(7, -1, -1))
    assert list(reader.samples()) == [*range(7, -1, -1)]
    with (reader.path / "samples.jsonl").open("a") as file:
        file.write("not json\n")
    with pytest.raises(ConfigError, match=r"samples\.jsonl: damaged \(line 9: .* delete it"):
        reader.samples()


@pytest.mark.parametrize(("shade", "kept"), [(0, True), (1, False)])
def test_results_of_other_images_are_removed(tmp_path: Path, shade: int, kept: bool) -> None:
    folder = RunFolder(tmp_path, "m", IDENTITY)
    folder.add(records([0, 1]), images([0, 1]))
    folder.write("results.json", "{}")
    folder.write("status", "done\n")
    (folder.path / "images/000001.png").write_bytes(b"damaged")
    RunFolder(tmp_path, "m", IDENTITY).add(records([0, 1]), images([0, 1], shade))
    assert (folder.path / "results.json").exists() == folder.finished() == kept
    assert sorted(folder.samples()) == [0, 1]


def test_first_of_two_writers_wins(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path, "m", IDENTITY), RunFolder(tmp_path, "m", IDENTITY)
    first.add(records([0, 1], who="first"), images([0, 1]))
    second.add(records([1, 2], who="second"), images([1, 2], shade=1))
    tidied = first.tidy([0, 1, 2])
    assert [record["who"] for record in tidied] == ["first", "first", "second"]
    assert len((first.path / "samples.jsonl").read_text().splitlines()) == 3


def _write(root: Path, offset: int) -> None:
    folder = RunFolder(root, "m", IDENTITY)
    for start in range(0, 40, 2):
        block = [(start + offset) % 40, (start + offset + 1) % 40]
        folder.add(records(block, who=offset), images(block, shade=offset))


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path, offset)) for offset in (0, 20, 10)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    folder = RunFolder(tmp_path, "m", IDENTITY)
    tidied = folder.tidy(range(40))
    assert len({record["index"] for record in tidied}) == 40


def test_folder_that_cannot_be_made_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^runs_dir=.*: cannot be written"):
        RunFolder(tmp_path / "file", "m", IDENTITY)


@pytest.mark.parametrize(
    ("count", "size", "shards"), [(96, 8, 1), (96, 8, 2), (13, 4, 3), (3, 8, 2), (1, 1, 1)]
)
def test_shards_share_whole_blocks(count: int, size: int, shards: int) -> None:
    every = blocks(count, size, 0, 1)
    shares = [blocks(count, size, shard, shards) for shard in range(shards)]
    assert sorted(block.start for share in shares for block in share) == [block.start for block in every]
    assert [index for block in every for index in block] == list(range(count))
    assert all(len(block) == size for block in every[:-1])


@pytest.mark.parametrize("name", ["", "images", "samples.jsonl"])
def test_nothing_is_written_through_a_link_out_of_a_run(tmp_path: Path, name: str) -> None:
    """The folder, or something in it, is replaced while the run is drawn."""
    folder = RunFolder(tmp_path / "runs", "m", IDENTITY)
    folder.add(records([0]), images([0]))
    theirs, place = tmp_path / "theirs", folder.path / name
    place.rename(theirs)
    place.symlink_to(theirs)
    if theirs.is_file():
        theirs.write_text("their last line")  # a run's own is cut off, as its process was killed
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    writes = [lambda: folder.add(records([1]), images([1])), folder.samples]
    for write in writes if name != "images" else writes[:1]:
        with pytest.raises(ConfigError, match=f"leads out of the run's folder, to {theirs}"):
            write()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
