"""Features go through a network once, and hashes of files are taken once: again only when they must."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from kvbench.eval.distribution.fid import Fid, FidReal
from kvbench.eval.distribution.frechet import frechet_distance
from kvbench.eval.distribution.kid import Kid
from kvbench.eval.distribution.precision_recall import PrecisionRecall
from kvbench.eval.files import digests, store
from kvbench.eval.files.digests import digest_path, hash_files_at
from kvbench.eval.networks import to_unit
from kvbench.eval.protocol.base import evaluate
from kvbench.eval.spaces.scenes import LpipsScenes, SceneFeatures, Scenes, perceptual_distance
from tests.eval.distribution.test_distribution import slow_kid, slow_precision
from tests.support.image_sets import FEATURES, GOLDEN, golden_pair, make_set, only, pixels, reason

SPACE = Scenes(str(FEATURES), batch=5)
NAMES = [f"s64_{i:03d}" for i in range(12)]


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("KVBENCH_FEATURES", str(tmp_path / "store"))
    store.recent.clear()
    yield tmp_path / "store"
    store.recent.clear()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Batch sizes that went through the scenes network."""
    sizes: list[int] = []
    stages = SceneFeatures.stages

    def counted(self: SceneFeatures, images: torch.Tensor) -> list[torch.Tensor]:
        sizes.append(len(images))
        return stages(self, images)

    monkeypatch.setattr(SceneFeatures, "stages", counted)
    return sizes


ALL = [Kid(SPACE), LpipsScenes(SPACE), Fid(SPACE), PrecisionRecall(SPACE)]


def test_every_scenes_metric_shares_one_pass(tmp_path: Path, seen: list[int]) -> None:
    images, reference = golden_pair(tmp_path, NAMES)
    results = evaluate(ALL, images, reference)
    assert [result.status for result in results] == ["ok"] * 4
    assert sum(seen) == 2 * len(NAMES)
    used = [result.provenance["features"] for result in results]
    assert used == [dict.fromkeys(("images", "reference"), how) for how in ("computed", *["reused"] * 3)]
    store.recent.clear()  # as in another process
    again = evaluate(ALL, images, reference)
    assert sum(seen) == 2 * len(NAMES)
    assert [result.scores for result in again] == [result.scores for result in results]
    assert all(set(r.provenance["features"].values()) == {"reused"} for r in again)


def test_distances_of_a_run_are_those_of_the_networks_features(tmp_path: Path) -> None:
    few = [*NAMES[:6], *NAMES[:6]]  # so that neither side covers as much as the other
    pair = tuple(
        make_set(tmp_path / side, [pixels(name, side) for name in names])
        for side, names in (("cmp", NAMES), ("ref", few))
    )
    network = SceneFeatures.load(FEATURES)
    with torch.no_grad():
        sides = [to_unit(side.stack(side.indices)) for side in pair]
        distances = perceptual_distance(*map(network.stages, sides))
        a, b = (network.features(side).double().numpy() for side in sides)
    assert np.abs(a - b).max() > 0.01
    scores = {}
    for metric in (Fid(SPACE), Kid(SPACE), PrecisionRecall(SPACE, neighbour=1)):
        scores |= only(metric, *pair).scores
    assert all(score.se is not None for score in scores.values())
    distance = pytest.approx(frechet_distance(a, b), rel=1e-3)
    assert {name: score.value for name, score in scores.items()} == {
        "fid_scenes": distance,
        "kid_scenes": pytest.approx(1000 * slow_kid(a, b, paired=True), rel=1e-3),
        "precision_scenes": slow_precision(a, b, 1),
        "recall_scenes": slow_precision(b, a, 1),
    }
    assert scores["precision_scenes"].value != scores["recall_scenes"].value
    [real] = only(FidReal(SPACE, str(pair[1].folder / "images")), pair[0]).scores.values()
    assert real.value == distance
    assert only(LpipsScenes(SPACE), *pair).samples["lpips_scenes"] == pytest.approx(
        distances.tolist(), abs=1e-6
    )
    np.testing.assert_allclose(SPACE.features(pair[0], "cpu").arrays["features"], a, atol=1e-5)


def flip_a_bit(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: data[:-7],
        flip_a_bit,
        lambda _: (GOLDEN / "arrays.safetensors").read_bytes(),
        lambda _: b"",
    ],
)
def test_a_damaged_file_is_computed_again(
    tmp_path: Path,
    own_store: Path,
    seen: list[int],
    harm: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    images = make_set(tmp_path / "run", [pixels(name, "ref") for name in NAMES[:3]])
    first = SPACE.features(images, "cpu")
    [path] = own_store.iterdir()
    sha256 = SPACE.weight.require()[1]
    assert path.name == f"{images.digest}-scenes-{sha256[:8]}.safetensors"
    whole = path.read_bytes()
    path.write_bytes(harm(whole))
    store.recent.clear()
    again = SPACE.features(images, "cpu")
    assert (again.reused, sum(seen)) == (False, 6)
    assert "computed again" in caplog.text
    assert path.read_bytes() == whole
    np.testing.assert_array_equal(again.arrays["features"], first.arrays["features"])


def test_other_versions_of_libraries_compute_again(
    tmp_path: Path, seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = make_set(tmp_path / "run", [pixels(name, "ref") for name in NAMES[:2]])
    SPACE.features(images, "cpu")
    store.recent.clear()
    with monkeypatch.context() as patch:
        patch.setattr("kvbench.eval.files.store.importlib.metadata.version", lambda name: "0.0")
        assert not SPACE.features(images, "cpu").reused
    assert sum(seen) == 4


def test_other_images_or_weights_have_other_files(tmp_path: Path, own_store: Path) -> None:
    images, reference = golden_pair(tmp_path, NAMES[:3])
    other = tmp_path / "features.safetensors"
    save_file({name: 2 * x for name, x in load_file(FEATURES).items()}, other)
    for space in (SPACE, replace(SPACE, path=str(other))):
        for side in (images, reference):
            assert not space.features(side, "cpu").reused
    assert len(list(own_store.iterdir())) == 4


def test_without_a_writable_store_the_process_still_computes_once(
    tmp_path: Path, own_store: Path, seen: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    own_store.write_text("a file where the folder should be")
    images, reference = golden_pair(tmp_path, NAMES)
    assert all(result.status == "ok" for result in evaluate(ALL, images, reference))
    assert sum(seen) == 2 * len(NAMES)
    assert "cannot be kept" in caplog.text


def test_no_partial_file_is_left(tmp_path: Path, own_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = make_set(tmp_path / "run", [pixels(NAMES[0], "ref")])

    def full(path: Path, content: bytes) -> None:
        path.open("wb").write(content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    SPACE.features(images, "cpu")
    assert list(own_store.iterdir()) == []


def test_infinite_features_fail(tmp_path: Path, own_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, reference = golden_pair(tmp_path, NAMES[:4])

    def broken(self: SceneFeatures, batch: torch.Tensor) -> list[torch.Tensor]:
        maps = torch.ones(len(batch), 64, 2, 2)
        maps[1] = torch.nan
        return [maps]

    monkeypatch.setattr(SceneFeatures, "stages", broken)
    why = reason(Fid(SPACE), "failed", images, reference)
    assert why == "ValueError: scenes_pair: images of image 1 are not finite"
    assert not own_store.exists()


def test_too_few_samples_are_skipped_before_any_network_runs(tmp_path: Path, seen: list[int]) -> None:
    one, _ = golden_pair(tmp_path / "one", NAMES[:1])
    three, _ = golden_pair(tmp_path / "three", NAMES[:3])
    too_few = "too few samples: a distance between distributions needs at least 2, got 1"
    assert {reason(metric, "skipped", one, one) for metric in (Fid(SPACE), Kid(SPACE))} == {too_few}
    why = reason(PrecisionRecall(SPACE), "skipped", three, three)
    assert why == "too few samples: the distance to neighbour 3 needs at least 4, got 3"
    assert seen == []
    four = only(PrecisionRecall(SPACE), *golden_pair(tmp_path / "four", NAMES[:4])).scores
    assert [score.se for score in four.values()] == [None, None]  # a group leaves 3, without such a neighbour


def test_many_samples_take_subsets(tmp_path: Path) -> None:
    images, reference = golden_pair(tmp_path, NAMES)
    result = only(Kid(SPACE, full_up_to=10, subsets=40, size=6), images, reference)
    whole = only(Kid(SPACE), images, reference).scores["kid_scenes"]
    score = result.scores["kid_scenes"]
    assert score.ci == "subsampling 40 of 6 seed 0"
    assert score.value == pytest.approx(whole.value, rel=0.3)
    assert only(Kid(SPACE, full_up_to=10, subsets=40, size=6), images, reference).scores == result.scores


# The scenes feature network


def test_scenes_network_is_small_and_reads_any_size() -> None:
    network = SceneFeatures.load(FEATURES)
    assert sum(p.numel() for p in network.parameters()) < 250_000
    images = torch.rand(3, 3, 96, 96)
    stages = network.stages(images)
    assert [tuple(s.shape[1:]) for s in stages] == [(16, 48, 48), (32, 24, 24), (48, 12, 12), (64, 6, 6)]
    assert network.features(images).shape == (3, 64)
    assert torch.allclose(network.features(images), stages[-1].mean((2, 3)))
    assert network.features(torch.rand(2, 3, 40, 64)).shape == (2, 64)


def test_another_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not hold a scenes feature network"):
        SceneFeatures.load(GOLDEN / "arrays.safetensors")


# Hashes of reference files (tests/core/test_kept.py has the rules)


FILES = ("a.png", "b.png", "c.png")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settled: None) -> Path:
    """A folder of files whose hashes are kept at once, however small and new they are."""
    monkeypatch.setattr(digests, "MIN_BYTES", 0)
    folder = tmp_path / "real"
    (folder / "below").mkdir(parents=True)
    for name in (*FILES, ".hidden", "below/d.png"):
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
    assert sorted(read) == [*FILES]
    assert hash_files_at(folder) == expected(folder)
    assert len(read) == len(FILES)
    assert hash_files_at(folder / "a.png") == {"a.png": expected(folder)["a.png"]}
    assert digest_path(folder) != digest_path(folder / "a.png")


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
    assert len(read) == 2 * len(FILES)
    assert "the next call reads files again" in caplog.text


def test_what_cannot_be_read_is_an_error(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        digest_path(folder / "nowhere")
    (folder / "broken.png").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match=r"broken\.png"):
        digest_path(folder)
