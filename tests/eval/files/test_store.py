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


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: data[:-7],
        lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
        lambda _: (GOLDEN / "arrays.safetensors").read_bytes(),
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


def test_other_versions_images_and_weights_compute_again(
    tmp_path: Path, own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, reference = golden_pair(tmp_path, NAMES[:2])
    other = tmp_path / "features.safetensors"
    save_file({name: 2 * x for name, x in load_file(FEATURES).items()}, other)
    for space in (SPACE, replace(SPACE, path=str(other))):
        for side in (images, reference):
            assert not space.features(side, "cpu").reused
    assert len(list(own_store.iterdir())) == 4
    store.recent.clear()
    monkeypatch.setattr("kvbench.eval.files.store.importlib.metadata.version", lambda name: "0.0")
    assert not SPACE.features(images, "cpu").reused


def test_without_a_writable_store_the_process_still_computes_once(
    tmp_path: Path, own_store: Path, seen: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    own_store.write_text("a file where the folder should be")
    assert all(result.status == "ok" for result in evaluate(ALL, *golden_pair(tmp_path, NAMES)))
    assert sum(seen) == 2 * len(NAMES)
    assert "cannot be kept" in caplog.text


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


# Hashes of reference files (tests/core/test_kept.py has the rules)


def test_files_are_read_once_and_names_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settled: None, caplog: pytest.LogCaptureFixture
) -> None:
    read: list[str] = []
    hash_path = digests.hash_path
    monkeypatch.setattr(digests, "MIN_BYTES", 0)  # hashes are kept at once, however small the files are
    monkeypatch.setattr(digests, "hash_path", lambda path: read.append(path.name) or hash_path(path))
    folder = tmp_path / "real"
    (folder / "below").mkdir(parents=True)
    names = ("a.png", "b.png", "c.png")
    for name in (*names, ".hidden", "below/d.png"):
        (folder / name).write_text(f"content of {name}")
    expected = {name: hashlib.sha256(f"content of {name}".encode()).hexdigest() for name in names}
    assert hash_files_at(folder) == hash_files_at(folder) == expected
    assert sorted(read) == [*names]
    assert hash_files_at(folder / "a.png") == {"a.png": expected["a.png"]}
    before, one = digest_path(folder), digest_path(folder / "a.png")
    read.clear()
    (folder / "c.png").rename(folder / "e.png")
    renamed = digest_path(folder)
    (folder / "a.png").unlink()
    fewer = digest_path(folder)
    (folder / "b.png").write_text("another content")
    assert len({before, one, renamed, fewer, digest_path(folder)}) == 5
    assert read == ["e.png", "b.png"]
    monkeypatch.setenv("KVBENCH_FEATURES", str(folder / "b.png"))  # no folder
    assert hash_files_at(folder) == hash_files_at(folder)
    assert sorted(read) == [*["b.png"] * 3, *["e.png"] * 3]
    assert "the next call reads files again" in caplog.text
    (folder / "broken.png").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match=r"broken\.png"):
        digest_path(folder)
