"""Image folders, pairing, weight files and the common protocol of evaluators."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.samples import SampleSetError, check_pairs
from kvbench.eval.files.weights import Weight, WeightError, file_sha256
from kvbench.eval.paired.metrics import Lpips, Psnr
from kvbench.eval.protocol.base import Evaluator, Result, evaluate, find_missing, make_result
from kvbench.eval.protocol.records import strict
from kvbench.eval.protocol.scores import MetricSpec, Score, mean_score


def make_set(folder: Path, count: int = 3, size: tuple[int, int] = (12, 10), seed: int = 0) -> Path:
    """A run folder of random images; `size` is width, height."""
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True)
    lines = []
    for index in range(count):
        path = folder / "images" / f"{index:06d}.png"
        Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(path)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        lines.append(
            {"index": index, "seed": 0, "prompt": f"prompt {index}", "sha256": sha256, "meta": {"tag": "x"}}
        )
    write_lines(folder, lines)
    return folder


def write_lines(folder: Path, lines: list[dict[str, object]]) -> None:
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_reads_by_index(tmp_path: Path) -> None:
    images = ImageSet(make_set(tmp_path / "run", 4))
    assert images.indices == [0, 1, 2, 3]
    assert images.image(2).shape == (10, 12, 3)
    assert images.meta(1) == {"tag": "x"}
    assert images.samples[3].size == (12, 10)
    assert ImageSet(tmp_path / "run", limit=2).indices == [0, 1]


def test_digest_follows_content_not_place(tmp_path: Path) -> None:
    same = [ImageSet(make_set(tmp_path / name)).digest for name in "ab"]
    assert same[0] == same[1]
    assert ImageSet(make_set(tmp_path / "c", seed=1)).digest != same[0]


def test_batches_split_at_size_changes(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "run", 5)
    path = folder / "images" / "000002.png"
    Image.new("RGB", (7, 7)).save(path)
    lines = read_lines(folder)
    lines[2]["sha256"] = file_sha256(path)
    write_lines(folder, lines)
    assert list(ImageSet(folder).batches(2, "x")) == [[0, 1], [2], [3, 4]]


def test_repeated_line_of_a_redone_block_is_accepted(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "run")
    lines = read_lines(folder)
    write_lines(folder, [*lines, {**lines[0], "seconds": 2.0}])
    assert len(ImageSet(folder)) == 3


def delete_image(folder: Path) -> None:
    (folder / "images" / "000001.png").unlink()


def extra_image(folder: Path) -> None:
    Image.new("RGB", (4, 4)).save(folder / "images" / "000009.png")


def truncate_image(folder: Path) -> None:
    path = folder / "images" / "000001.png"
    path.write_bytes(path.read_bytes()[:-20])


def truncate_line(folder: Path) -> None:
    text = (folder / "samples.jsonl").read_text()
    (folder / "samples.jsonl").write_text(text[:-30])


def drop_seed(folder: Path) -> None:
    write_lines(folder, [{k: v for k, v in line.items() if k != "seed"} for line in read_lines(folder)])


def conflict(folder: Path) -> None:
    lines = read_lines(folder)
    write_lines(folder, [*lines, {**lines[0], "seed": 5}])


def no_lines(folder: Path) -> None:
    write_lines(folder, [])


def no_file(folder: Path) -> None:
    (folder / "samples.jsonl").unlink()


def replace_image(folder: Path, data: bytes | None = None, mode: str = "L") -> None:
    path = folder / "images" / "000001.png"
    if data is None:
        Image.new(mode, (12, 10)).save(path)
    else:
        path.write_bytes(data)
    lines = read_lines(folder)
    lines[1]["sha256"] = file_sha256(path)
    write_lines(folder, lines)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (delete_image, r"names images that are not there: 000001\.png"),
        (extra_image, r"without a line in samples\.jsonl: 000009\.png"),
        (truncate_image, r"000001\.png is not the recorded file"),
        (truncate_line, "line 3: JSONDecodeError"),
        (drop_seed, "line 1: KeyError 'seed'"),
        (conflict, "line 4: index 0 appears twice"),
        (no_lines, "holds no samples"),
        (no_file, "samples.jsonl is missing"),
        (replace_image, "mode L: 8-bit RGB"),
        (lambda folder: replace_image(folder, mode="RGBA"), "mode RGBA"),
        (lambda folder: replace_image(folder, mode="I;16"), "mode I;16"),
        (lambda folder: replace_image(folder, data=b"not a png"), "is not an image"),
    ],
)
def test_bad_folder(tmp_path: Path, harm: Callable[[Path], None], message: str) -> None:
    folder = make_set(tmp_path / "run")
    harm(folder)
    with pytest.raises(SampleSetError, match=message):
        ImageSet(folder)


def test_image_cut_short_before_it_was_recorded(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "run")
    whole = (folder / "images" / "000001.png").read_bytes()
    replace_image(folder, data=whole[: len(whole) // 2])
    images = ImageSet(folder)
    with pytest.raises(SampleSetError, match=r"000001\.png cannot be decoded"):
        images.image(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 7}, "sample 1 has seed 7 and 0"),
        ({"prompt": "other"}, "sample 1 has prompt 'other' and 'prompt 1'"),
    ],
)
def test_unequal_records_cannot_be_paired(tmp_path: Path, change: dict[str, object], message: str) -> None:
    reference = ImageSet(make_set(tmp_path / "full"))
    folder = make_set(tmp_path / "run", seed=1)
    lines = read_lines(folder)
    write_lines(folder, [lines[0], {**lines[1], **change}, lines[2]])
    with pytest.raises(SampleSetError, match=message):
        evaluate([Psnr()], ImageSet(folder), reference)


def test_unequal_index_sets_and_sizes_cannot_be_paired(tmp_path: Path) -> None:
    three, four = ImageSet(make_set(tmp_path / "a", 3)), ImageSet(make_set(tmp_path / "b", 4))
    with pytest.raises(SampleSetError, match="missing from the first: 3"):
        check_pairs(three, four)
    with pytest.raises(SampleSetError, match="missing from the reference: 3"):
        check_pairs(four, three)
    with pytest.raises(SampleSetError, match=r"sample 0 has size \(12, 10\) and \(10, 12\)"):
        check_pairs(three, ImageSet(make_set(tmp_path / "c", 3, size=(10, 12))))


@dataclass(frozen=True)
class Mean(Evaluator):
    """Mean brightness; breaks on demand."""

    broken: bool = False
    name: ClassVar[str] = "mean"
    protocol: ClassVar[str] = "uint8"
    metrics: ClassVar[dict[str, MetricSpec]] = {"mean": MetricSpec("higher")}

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        if self.broken:
            raise RuntimeError("no light")
        values = [float(images.image(index).mean()) for index in images.indices]
        return make_result(self, {"mean": mean_score(values)}, {"index": images.indices, "mean": values})


@dataclass(frozen=True)
class NeedsPackage(Mean):
    packages: ClassVar[tuple[str, ...]] = ("no_such_package",)


def test_results_carry_status_and_provenance(tmp_path: Path) -> None:
    images = ImageSet(make_set(tmp_path / "run"))
    good, broken, lacking, unpaired = evaluate([Mean(), Mean(broken=True), NeedsPackage(), Psnr()], images)
    assert (good.status, good.scores["mean"].n) == ("ok", 3)
    assert good.provenance["images"] == {"digest": images.digest, "n": 3, "run": "run"}
    assert good.provenance["settings"] == {"broken": False}
    assert {"torch", "numpy", "pillow", "python"} <= set(good.provenance["versions"])
    assert (broken.status, broken.reason) == ("failed", "RuntimeError: no light")
    assert "no light" in broken.provenance["traceback"]
    assert lacking.status == "skipped"
    assert "pip install no_such_package" in str(lacking.reason)
    assert unpaired.status == "skipped"
    entry = unpaired.entries()["psnr"]
    assert (entry.value, entry.n, entry.status, entry.needs_reference) == (None, 0, "skipped", True)


def test_saved_record_is_strict_json(tmp_path: Path) -> None:
    scores = {"psnr": Score(math.inf, n=2, sd=math.nan)}
    samples = {"index": [0, 1], "psnr": [math.inf, 3.0]}
    result = Result("psnr", "uint8", "ok", None, Psnr.metrics, scores, samples)
    path = result.save(tmp_path)
    assert path.name == "psnr-uint8.json"

    def refuse(name: str) -> None:
        raise AssertionError(name)

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record["scores"]["psnr"]["value"] is None
    assert record["nonfinite"] == 2
    lines = [
        json.loads(line, parse_constant=refuse) for line in (tmp_path / "psnr-uint8.samples.jsonl").open()
    ]
    assert lines == [{"index": 0, "psnr": None, "nonfinite": 1}, {"index": 1, "psnr": 3.0}]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["psnr-uint8.json", "psnr-uint8.samples.jsonl"]


def test_strict_turns_numpy_into_numbers() -> None:
    assert strict({"a": np.float32(0.5), "b": (np.int64(2), np.bool_(True))}) == {"a": 0.5, "b": [2, True]}


def stand_in(tmp_path: Path) -> Weight:
    path = tmp_path / "net.bin"
    path.write_bytes(b"weights")
    return Weight("net.bin", "https://example.org/net.bin", hashlib.sha256(b"weights").hexdigest(), 7_000_000)


def test_weight_is_found_in_the_stated_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = stand_in(tmp_path)
    monkeypatch.delenv("KVBENCH_WEIGHTS", raising=False)
    assert weight.find() is None
    cached = replace(weight, places=("$SOME_CACHE/hub",))
    (tmp_path / "cache" / "hub").mkdir(parents=True)
    (tmp_path / "cache" / "hub" / "net.bin").write_bytes(b"weights")
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))
    assert cached.find() == tmp_path / "cache" / "hub" / "net.bin"
    monkeypatch.setenv("KVBENCH_WEIGHTS", str(tmp_path))
    assert cached.find() == tmp_path / "net.bin"
    assert replace(cached, path=str(tmp_path / "elsewhere.bin")).find() is None
    assert cached.require() == (tmp_path / "net.bin", weight.sha256)


def test_file_inside_a_package_is_found() -> None:
    found = Weight("METADATA", path="pkg://numpy/version.py").find()
    assert found is not None
    assert found.parent == Path(np.__file__).parent


def test_wrong_hash_is_refused_even_after_a_right_one(tmp_path: Path) -> None:
    weight = replace(stand_in(tmp_path), path=str(tmp_path / "net.bin"))
    weight.require()
    (tmp_path / "net.bin").write_bytes(b"weightz!")
    with pytest.raises(WeightError, match=f"expected {weight.sha256}"):
        weight.require()


def test_missing_weights_are_skipped_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBENCH_WEIGHTS", raising=False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    images = ImageSet(make_set(tmp_path / "run"))
    [result] = evaluate([Lpips()], images, images)
    assert result.status == "skipped"
    assert result.reason == find_missing(Lpips())[0]
    assert result.reason == (
        "weights missing: alexnet-owt-7be5be79.pth. "
        "Get it with: make weights (python -m kvbench.eval.files.fetch)"
    )
    [named] = find_missing(Lpips(path="~/nowhere.pth"))
    assert named.startswith(
        "weights missing: ~/nowhere.pth. Correct the setting that names it, or leave that null"
    )
    [weight] = Lpips().weights
    assert weight.directions().startswith(
        "Get https://download.pytorch.org/models/alexnet-owt-7be5be79.pth "
        "(244 MB, sha256 7be5be791159472b1fbf3c69796f7cb30dca7ad8466c2df70058c37116cdee02), "
        "put it in $KVBENCH_WEIGHTS or ~/.cache/kvbench/weights or $TORCH_HOME/hub/checkpoints"
    )
    command = "curl -fL --create-dirs -o {}/alexnet-owt-7be5be79.pth http"
    assert command.format("~/.cache/kvbench/weights") in weight.directions()
    monkeypatch.setenv("KVBENCH_WEIGHTS", str(tmp_path))
    assert command.format("$KVBENCH_WEIGHTS") in weight.directions()


def test_wrong_weights_fail(tmp_path: Path) -> None:
    (tmp_path / "alexnet.pth").write_bytes(b"random")
    images = ImageSet(make_set(tmp_path / "run"))
    [result] = evaluate([Lpips(path=str(tmp_path / "alexnet.pth"))], images, images)
    assert result.status == "failed"
    assert "is not alexnet-owt-7be5be79.pth" in str(result.reason)
