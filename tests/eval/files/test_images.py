"""Run folders: records, damage, kinds of samples, pairing and the common protocol of evaluators."""

import json
import math
from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from kvbench.core.config import ConfigError
from kvbench.core.files import hash_path
from kvbench.eval.files import kinds
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.samples import SampleSet, SampleSetError
from kvbench.eval.files.weights import file_sha256
from kvbench.eval.paired.lpips import Lpips
from kvbench.eval.paired.ms_ssim import MsSsim
from kvbench.eval.paired.psnr import Psnr
from kvbench.eval.paired.ssim import Ssim
from kvbench.eval.protocol.base import Result, evaluate
from kvbench.eval.protocol.records import strict
from kvbench.eval.protocol.scores import Score
from kvbench.forced.record import LABELS, ScoredText
from tests.support.image_sets import make_set, write_lines


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


def test_a_file_that_a_network_lists_late_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path)
    listed = [path for path in (tmp_path / "images").iterdir() if path.name != "000002.png"]
    monkeypatch.setattr(
        Path, "rglob", lambda *_: listed
    )  # as a client of a network file system has cached it
    assert ImageSet(tmp_path).digest == made.digest


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
    [(3, {"seed": 7}, "sample 1 has seed 7 and 0"), (2, {}, "missing from the first: 2")],
)
def test_unequal_records_fail(tmp_path: Path, count: int, change: dict[str, object], message: str) -> None:
    reference = make(tmp_path / "full")
    make(tmp_path / "run", count, seed=1)
    edit(tmp_path / "run", lambda lines: lines[1].update(change))
    with pytest.raises(SampleSetError, match=message):
        evaluate([Psnr()], ImageSet(tmp_path / "run"), reference)


def test_results_carry_status_and_provenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = make(tmp_path / "run", size=(12, 12))
    monkeypatch.setattr(MsSsim, "run", lambda *_: {}["no light"])
    monkeypatch.setattr(Lpips, "packages", ("no_such_package",))
    good, broken, lacking = evaluate([Ssim(batch=2), MsSsim(), Lpips()], images, images)
    assert (good.status, good.scores["ssim"].n) == ("ok", 3)
    assert good.provenance["images"] == {"digest": images.digest, "n": 3, "run": "run"}
    assert good.provenance["settings"] == {"batch": 2, "double": False}
    assert {"torch", "numpy", "pillow", "python"} <= set(good.provenance["versions"])
    assert (broken.status, broken.reason) == ("failed", "KeyError: 'no light'")
    assert "no light" in broken.provenance["traceback"]
    assert lacking.status == "skipped"
    assert "pip install no_such_package" in str(lacking.reason)
    [unpaired] = evaluate([Psnr()], images)
    entry = unpaired.entries()["psnr"]
    assert (entry.value, entry.n, entry.status, entry.needs_reference) == (None, 0, "skipped", True)


def test_saved_record_is_strict_json(tmp_path: Path) -> None:
    scores = {"psnr": Score(math.inf, n=2, sd=math.nan)}
    samples = {"index": [0, 1], "psnr": [math.inf, 3.0]}
    path = Result("psnr", "uint8", "ok", None, Psnr.metrics, scores, samples).save(tmp_path)
    refuse = partial(json.loads, parse_constant=pytest.fail)
    record = refuse(path.read_text())
    assert (record["scores"]["psnr"]["value"], record["nonfinite"]) == (None, 2)
    lines = [refuse(line) for line in (tmp_path / "psnr-uint8.samples.jsonl").open()]
    assert lines == [{"index": 0, "psnr": None, "nonfinite": 1}, {"index": 1, "psnr": 3.0}]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["psnr-uint8.json", "psnr-uint8.samples.jsonl"]
    assert strict({"a": np.float32(0.5), "b": (np.int64(2), np.bool_(True))}) == {"a": 0.5, "b": [2, True]}


class SoundSet(SampleSet):
    """Sounds of a plugin."""

    kind = "sounds"
    suffix = ".wav"


SOUNDS = kinds.SampleKind(SoundSet, bytes)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> object:
    """Install entry points by their values, without a package."""

    def add(*values: str) -> None:
        points = [EntryPoint("mine", value, kinds.PLUGINS) for value in values]
        monkeypatch.setattr(kinds, "entry_points", lambda group: points if group == kinds.PLUGINS else [])
        kinds.list_kinds.cache_clear()

    yield add
    kinds.list_kinds.cache_clear()


def test_a_plugin_adds_a_kind(install: object, tmp_path: Path) -> None:
    install(f"{__name__}:SOUNDS")
    assert kinds.find_kind("sounds").find(tmp_path, 3) == tmp_path / "sounds" / "000003.wav"
    (tmp_path / "sounds").mkdir()
    assert kinds.find_stored_kind(tmp_path).samples is SoundSet
    assert list(kinds.list_kinds()) == ["images", "texts", "readings", "sounds"]


@pytest.mark.parametrize("value", ["kvbench.eval.files.kinds:IMAGES", "kvbench.eval.files.kinds:PLUGINS"])
def test_an_entry_that_is_no_new_kind_is_refused(install: object, value: str) -> None:
    install(value)
    with pytest.raises(ConfigError, match=f"{value} is not a new SampleKind"):
        kinds.find_kind("images")


def test_other_outputs_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"its output is smells; kinds .* are images, texts, readings"):
        kinds.find_kind("smells")
    with pytest.raises(SampleSetError, match=r"samples\.jsonl is missing"):
        kinds.open_samples(tmp_path)


def columns(**more: object) -> dict[str, np.ndarray]:
    whole = {name: np.zeros(3, np.int32) for name in ("tokens", "likeliest", "likeliest_full")}
    return whole | {name: np.zeros(3, np.float32) for name in ("kl", "nll", "nll_full")} | more


@pytest.mark.parametrize(
    ("tensors", "labels", "message"),
    [
        (columns(kl=np.zeros(2, np.float32)), '{"words": {}, "groups": []}', "columns differ in length"),
        (columns(), "{", "not a record of forced decoding"),
        (columns(), '{"words": {"a": "b"}, "groups": []}', "not a record of forced decoding"),
        (columns(), None, "not a record of forced decoding"),
    ],
)
def test_damaged_readings_are_named(
    tmp_path: Path, tensors: dict[str, np.ndarray], labels: str | None, message: str
) -> None:
    path = tmp_path / "readings" / "000000.safetensors"
    path.parent.mkdir()
    save_file(tensors, path, None if labels is None else {LABELS: labels})
    write_lines(tmp_path, [{"index": 0, "seed": 0, "prompt": "", "sha256": hash_path(path)}])
    with pytest.raises(SampleSetError, match=f"{path}: .*{message}"):
        kinds.open_samples(tmp_path)


def test_a_reading_is_stored_and_read(tmp_path: Path) -> None:
    integers, numbers = np.array([2**40, 3]), np.array([0.25, 1.5], np.float32)
    columns = (integers, integers, integers[::-1], numbers, numbers + 1, numbers + 2)
    text = ScoredText(*columns, {3: "a", 2**40: "\N{BULLET} b"}, (1, 1))
    path = tmp_path / "000000.safetensors"
    path.write_bytes(kinds.READINGS.encode(text))
    stored = ScoredText.read(path)
    assert stored.tokens.tolist() == [2**40, 3]
    assert stored.kl.tolist() == [0.25, 1.5]
    assert (stored.words, stored.groups) == (text.words, text.groups)
    assert stored.same.tolist() == [False, False]
    assert kinds.READINGS.encode(text) == kinds.READINGS.encode(SimpleNamespace(**vars(text)))
