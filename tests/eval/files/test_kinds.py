"""Kinds of samples: files of readings, damage, and kinds that a plugin adds."""

from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvbench.core.config import ConfigError
from kvbench.core.files import hash_path
from kvbench.eval.files import kinds
from kvbench.eval.files.samples import SampleSet, SampleSetError
from kvbench.forced.record import LABELS, ScoredText
from tests.support.image_sets import write_lines


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
    assert kinds.find_stored_kind(tmp_path) is not None
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
