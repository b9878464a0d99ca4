"""Image folders, pairing, weight files and the common protocol of evaluators."""

import json
import math
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.samples import SampleSetError
from kvbench.eval.files.weights import file_sha256
from kvbench.eval.paired.psnr import Psnr
from kvbench.eval.protocol.base import Evaluator, Result, evaluate, make_result
from kvbench.eval.protocol.records import strict
from kvbench.eval.protocol.scores import MetricSpec, Score, mean_score
from tests.support.image_sets import make_set, write_lines
from tests.support.network_files import network_files


def make(folder: Path, count: int = 3, size: tuple[int, int] = (12, 10), seed: int = 0) -> ImageSet:
    """A run of random images; `size` is width, height."""
    images = np.random.default_rng(seed).integers(0, 256, (count, size[1], size[0], 3), np.uint8)
    return make_set(folder, list(images), metas=[{"tag": "x"}] * count)


def edit(folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Change the records of a run in place."""
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    change(lines)
    write_lines(folder, lines)


def put(folder: Path, image: Image.Image | bytes, *, record: bool = True) -> None:
    """Put another image, or other bytes, in place of image 1, and into its record."""
    path = folder / "images" / "000001.png"
    image.save(path) if isinstance(image, Image.Image) else path.write_bytes(image)
    if record:
        edit(folder, lambda lines: lines[1].update(sha256=file_sha256(path)))


def read(folder: Path) -> bytes:
    return (folder / "images" / "000001.png").read_bytes()


def test_a_file_that_a_network_lists_late_is_there(tmp_path: Path) -> None:
    made = make(tmp_path / "run", 3)
    late = tmp_path / "run/images/000002.png"
    content = late.read_bytes()
    late.unlink()
    with network_files(tmp_path, seconds=60):
        assert len(list(late.parent.glob("*.png"))) == 2
        (tmp_path / "other").write_bytes(content)
        subprocess.run(["mv", tmp_path / "other", late], check=True)  # another client
        assert len(list(late.parent.glob("*.png"))) == 2
        assert ImageSet(tmp_path / "run").digest == made.digest


def test_digest_follows_content_not_place(tmp_path: Path) -> None:
    same = [make(tmp_path / name).digest for name in "ab"]
    assert same[0] == same[1]
    assert make(tmp_path / "c", seed=1).digest != same[0]


def test_batches_split_at_size_changes(tmp_path: Path) -> None:
    make(tmp_path, 5)
    put(tmp_path, Image.new("RGB", (7, 7)))
    assert list(ImageSet(tmp_path).batches(2, "x")) == [[0], [1], [2, 3], [4]]


def test_a_repeated_line_is_accepted_and_separators_of_paragraphs_end_none(tmp_path: Path) -> None:
    make(tmp_path)
    prompt = "one\u2028two\x85three"
    edit(tmp_path, lambda lines: lines[1].update(prompt=prompt))
    edit(tmp_path, lambda lines: lines.append({**lines[0], "seconds": 2.0}))
    records = tmp_path / "samples.jsonl"
    records.write_text(records.read_text().replace("\\u2028", "\u2028").replace("\\u0085", "\x85"))
    assert [sample.prompt for sample in ImageSet(tmp_path).samples.values()] == [
        "prompt 0",
        prompt,
        "prompt 2",
    ]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda run: (run / "images/000001.png").unlink(), r"missing images of samples\.jsonl: 000001\.png"),
        (lambda run: (run / "images/000009.png").touch(), r"images not in samples\.jsonl: 000009\.png"),
        (lambda run: put(run, read(run)[:-20], record=False), r"000001\.png is not the recorded file"),
        (lambda run: (run / "samples.jsonl").write_text('{"index": 0'), "line 1: JSONDecodeError"),
        (lambda run: edit(run, lambda lines: lines[1].pop("seed")), "line 2: KeyError 'seed'"),
        (
            lambda run: edit(run, lambda lines: lines.append({**lines[0], "seed": 5})),
            "line 4: index 0 has two different records",
        ),
        (lambda run: edit(run, list.clear), "holds no samples"),
        (lambda run: (run / "samples.jsonl").unlink(), "samples.jsonl is missing"),
        (Image.new("L", (12, 10)), "mode L: 8-bit RGB"),
        (b"not a png", "cannot be read"),
    ],
)
def test_bad_folder(
    tmp_path: Path, harm: Callable[[Path], object] | Image.Image | bytes, message: str
) -> None:
    make(tmp_path)
    put(tmp_path, harm) if isinstance(harm, Image.Image | bytes) else harm(tmp_path)
    with pytest.raises(SampleSetError, match=message):
        ImageSet(tmp_path)


def test_image_cut_short_before_it_was_recorded(tmp_path: Path) -> None:
    make(tmp_path)
    put(tmp_path, read(tmp_path)[: len(read(tmp_path)) // 2])
    images = ImageSet(tmp_path)
    with pytest.raises(SampleSetError, match=r"000001\.png cannot be read"):
        images.image(1)


@pytest.mark.parametrize(
    ("count", "change", "message"),
    [
        (3, {"seed": 7}, "sample 1 has seed 7 and 0"),
        (2, {}, "missing from the first: 2"),
    ],
)
def test_unequal_records_fail(tmp_path: Path, count: int, change: dict[str, object], message: str) -> None:
    reference = make(tmp_path / "full")
    make(tmp_path / "run", count, seed=1)
    edit(tmp_path / "run", lambda lines: lines[1].update(change))
    with pytest.raises(SampleSetError, match=message):
        evaluate([Psnr()], ImageSet(tmp_path / "run"), reference)


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
    images = make(tmp_path / "run")
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
