"""FID, KID, Inception Score, precision and recall on the official programs with stand-in weights, and real images."""

import hashlib
import io
import math
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file

from kvbench.eval.distribution import dataset
from kvbench.eval.distribution.dataset import Packed, Pictures, read_features, read_moments
from kvbench.eval.distribution.fid import Fid, FidReal
from kvbench.eval.distribution.frechet import frechet_distance, moments
from kvbench.eval.distribution.inception_score import InceptionScore, inception_score
from kvbench.eval.distribution.kid import Kid
from kvbench.eval.distribution.mind import MindReal
from kvbench.eval.distribution.precision_recall import PrecisionRecall, PrecisionRecallReal
from kvbench.eval.files import store
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.samples import SampleSetError
from kvbench.eval.files.weights import WeightError
from kvbench.eval.spaces.inception import Adm, AdmSpatial, Clean, load_inception
from tests.eval.distribution.test_distribution import precision_recall
from tests.support.image_sets import adm_stand_in, clean_stand_in, golden_pair, make_set, only, pixels, reason

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.usefixtures("offline"),
]
FEW = [f"s64_{i:03d}" for i in range(6)]
Pair = tuple[ImageSet, ImageSet]


@pytest.fixture(scope="module", autouse=True)
def own_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBENCH_FEATURES", str(tmp_path_factory.mktemp("store")))
        store.recent.clear()
        yield
        store.recent.clear()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Clean:
    return clean_stand_in(tmp_path_factory.mktemp("clean"), batch=7)


@pytest.fixture(scope="module")
def adm(tmp_path_factory: pytest.TempPathFactory) -> Adm:
    return adm_stand_in(tmp_path_factory.mktemp("adm"))


@pytest.fixture(scope="module")
def few_pairs(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return golden_pair(tmp_path_factory.mktemp("few"), FEW)


# clean-fid's protocol


def test_fid_follows_the_clean_protocol(clean: Clean, few_pairs: Pair) -> None:
    from cleanfid.fid import get_folder_features
    from cleanfid.inception_torchscript import InceptionV3W

    fid, kid, shares = (only(one(clean), *few_pairs) for one in (Fid, Kid, PrecisionRecall))
    oracle = InceptionV3W(str(Path(str(clean.path)).parent), download=False, resize_inside=False)
    quiet = {"num_workers": 0, "device": torch.device("cpu"), "mode": "clean", "verbose": False}
    sides = [get_folder_features(str(side.folder / "images"), oracle, **quiet)[:, :64] for side in few_pairs]
    ours = clean.features(few_pairs[0], "cpu").arrays["features"]
    np.testing.assert_allclose(ours, sides[0], rtol=1e-5, atol=1e-5)
    assert fid.scores["fid_paired_clean"].value == pytest.approx(frechet_distance(*sides), rel=1e-5)
    assert fid.provenance["weights"] == {clean.weight.file: clean.network.sha256}
    assert shares.scores["precision_paired_clean"].value == precision_recall(*sides)[0]
    assert shares.scores["recall_paired_clean"].value == precision_recall(*sides)[1]
    for result in (kid, shares):
        assert result.provenance["features"] == {"images": "reused", "reference": "reused"}
        assert all(score.se is not None for score in result.scores.values())


# ADM's protocol


@pytest.mark.slow
def test_adm_runs_the_program_of_torch_fidelity(adm: Adm, few_pairs: Pair) -> None:
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    images, _ = few_pairs
    found = Adm(batch=2).compute(images, Path(str(adm.path)), "cpu")
    oracle = FeatureExtractorInceptionV3(
        "oracle", ["2048", "logits_unbiased"], feature_extractor_weights_path=adm.path
    )
    stack = torch.from_numpy(images.stack(images.indices[:2])).permute(0, 3, 1, 2)
    features, logits = oracle(stack)
    np.testing.assert_allclose(found["features"][:2], features, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["logits"][:2], logits, rtol=1e-4, atol=1e-5)


def test_the_inception_score_does_not_depend_on_the_order_of_classes(adm: Adm, few_pairs: Pair) -> None:
    images, _ = few_pairs
    result = only(InceptionScore(adm, chunk=3), images)
    logits = adm.features(images, "cpu").arrays["logits"]
    shuffled = logits[np.random.default_rng(0).permutation(len(logits))]
    assert result.scores["is"].value == pytest.approx(inception_score(shuffled, 3).mean(), rel=1e-12)
    assert result.scores["is"].se is not None
    whole, rest = inception_score(shuffled, 4)  # 4 and 2 images
    uneven = only(InceptionScore(adm, chunk=4), images).scores["is"].value
    assert uneven == pytest.approx((4 * whole + 2 * rest) / 6, rel=1e-12)
    assert "6 samples: not to be compared with published numbers on 50000" in str(result.reason)
    assert result.provenance["weights"] == {adm.weight.file: adm.network.sha256}


@pytest.mark.slow
def test_a_run_against_adms_reference_batch(tmp_path: Path, adm: Adm, few_pairs: Pair) -> None:
    images, reference = few_pairs
    path = tmp_path / "batch.npz"
    mean, covariance = moments(adm.features(reference, "cpu").arrays["features"])
    more = {"mu_s": np.zeros(3), "sigma_s": np.eye(3), "arr_0": reference.stack(reference.indices)}
    np.savez(path, mu=mean.numpy(), sigma=covariance.numpy(), **more)
    a, b = (adm.features(side, "cpu").arrays["features"] for side in few_pairs)
    fid = only(FidReal(adm, str(path)), images)
    shares = only(PrecisionRecallReal(adm, str(path)), images)
    assert fid.scores["fid_adm"].value == pytest.approx(frechet_distance(a, b), abs=1e-6)
    assert fid.scores["fid_adm"].se is not None
    assert fid.provenance["features"] == {"images": "reused"}
    assert fid.provenance["weights"]["batch.npz"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [shares.scores[name].value for name in ("precision", "recall")] == list(precision_recall(a, b))
    assert shares.provenance["features"] == {"images": "reused"}
    digest = fid.provenance["weights"]["batch.npz"]
    assert shares.provenance["dataset"] == {"digest": digest, "n": len(FEW), "features": "computed"}


def test_batches_are_streamed_and_belong_to_adm(tmp_path: Path) -> None:
    stored = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), np.uint8)
    moments = {"mu": np.zeros(3), "sigma": np.eye(3), "mu_s": np.ones(3), "sigma_s": np.eye(3)}
    np.savez_compressed(tmp_path / "x.npz", arr_0=stored, **moments)
    parts = list(Packed(tmp_path / "x.npz").stacks(2, "x"))
    assert [len(part) for part in parts] == [2, 2, 1]
    np.testing.assert_array_equal(np.concatenate(parts), stored)
    for space, mean in ((Adm(), 0), (AdmSpatial(), 1)):
        assert read_moments(tmp_path / "x.npz", space, "cpu")[0].tolist() == [mean] * 3
    with pytest.raises(SampleSetError, match="belongs to the space adm, not clean"):
        read_moments(tmp_path / "x.npz", Clean(), "cpu")


# Folders and statistics


def test_statistics_stand_for_their_folder(tmp_path: Path, clean: Clean, few_pairs: Pair) -> None:
    images, _ = few_pairs
    real = make_set(tmp_path / "real", [pixels(name, "ref") for name in FEW]).folder / "images"
    out = tmp_path / "statistics.safetensors"
    dataset.save_statistics(Pictures(real), clean, "cpu", out)
    once = out.read_bytes()
    dataset.save_statistics(Pictures(real), clean, "cpu", out)
    assert out.read_bytes() == once
    found = [only(FidReal(clean, str(path)), images) for path in (real, out)]
    values = [result.scores["fid_real_clean"].value for result in found]
    known = {"digest": Pictures(real).digest, "n": 6}
    assert found[0].provenance["dataset"] == {**known, "features": "reused"}
    assert found[1].provenance["dataset"] == known
    features = [clean.features(side, "cpu").arrays["features"] for side in few_pairs]
    assert values[0] == pytest.approx(frechet_distance(*features), abs=1e-6)
    assert values[1] == pytest.approx(values[0], abs=1e-12)


def test_the_command_makes_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = clean_stand_in(tmp_path)
    real = make_set(tmp_path / "real", [pixels(name, "ref") for name in FEW]).folder / "images"
    out = tmp_path / "out.safetensors"
    (tmp_path / "void").mkdir()
    (tmp_path / "notes").write_text("a file")
    path = ("--path", str(clean.path))
    for arguments, why in (
        ((real, out, *path), "is not inception-2015-12-05.pt"),
        ((tmp_path / "none", out), f"{tmp_path / 'none'} is not a folder; name a folder of images\n"),
        ((tmp_path / "void", out), "holds no images"),
        ((real, tmp_path / "out.npz", *path), "ends with .safetensors"),
        ((real, tmp_path / "notes/out.safetensors", *path), "is not a folder"),
        ((real, out, "--device", "tpu9"), "device=tpu9: torch has no such device; give cpu or cuda\n"),
    ):
        assert dataset.main([*map(str, arguments)]) == 2
        assert why in capsys.readouterr().err
    assert not out.exists()
    monkeypatch.setitem(dataset.SPACES, "clean", lambda path: replace(clean, path=path))
    assert dataset.main([str(real), str(out), "--path", str(clean.path)]) == 0
    assert read_moments(out, clean, "cpu")[0].shape == (64,)


GOOD = {"mu": np.zeros(3), "sigma": np.eye(3)}
UNREAD, UNSEEN = "mu and sigma cannot be read", "no images can be read from arr_0"
IMAGES = np.zeros((4, 8, 8, 3), np.uint8)


def packed(**arrays: object) -> bytes:
    """The content of an .npz file."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (packed(mu=np.zeros(3)), f"{UNREAD}.*sigma"),
        (packed(mu=np.array([{}], object), sigma=np.eye(3)), f"{UNREAD}.*pickle"),
        (pickle.dumps(GOOD), f"{UNREAD}.*pickle"),
        (packed(mu=np.zeros(3), sigma=np.eye(4)), r"mean \(3,\) and covariance \(4, 4\) do not fit together"),
        (packed(mu=np.full(3, math.nan), sigma=np.eye(3)), "mean or covariance is not finite"),
        (packed(mu=np.zeros(3), sigma=np.arange(9.0).reshape(3, 3)), "not symmetric"),
        (packed(arr_0=IMAGES.astype(np.float32)), "arr_0 is float32"),
        (packed(arr_0=IMAGES[..., :1]), r"arr_0 is uint8 \(4, 8, 8, 1\)"),
        (packed(arr_0=IMAGES).replace(bytes(IMAGES.size), b"x" + bytes(IMAGES.size - 1)), UNSEEN),
        (b"PK nonsense", "no images can be read"),
    ],
)
def test_bad_reference_batches_are_one_clear_message(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    of_images = "arr_0" in message or "images" in message
    with pytest.raises(SampleSetError, match=f"x.npz: .*{message}"):
        list(Packed(path).stacks(4, "x")) if of_images else read_moments(path, Adm(), "cpu")


def test_wrong_statistics_are_one_clear_message(tmp_path: Path, clean: Clean, few_pairs: Pair) -> None:
    path = tmp_path / "s.safetensors"
    dataset.save_statistics(few_pairs[1], clean, "cpu", path)
    (tmp_path / "other").mkdir()
    other = clean_stand_in(tmp_path / "other")
    changed = replace(other, network=replace(other.network, sha256=None))
    with Path(str(other.path)).open("ab") as file:
        file.write(b" ")
    with pytest.raises(SampleSetError, match="made with a different network"):
        read_moments(path, changed, "cpu")
    with pytest.raises(SampleSetError, match="statistics of the space clean, not adm"):
        read_moments(path, Adm(), "cpu")
    with pytest.raises(SampleSetError, match="images are needed here"):
        read_features(path, clean, "cpu")
    for content in (safetensors.torch.save({"mean": torch.zeros(2)}), b"short"):
        path.write_bytes(content)
        with pytest.raises(SampleSetError, match=r"not statistics of a dataset.*python -m kvbench"):
            read_moments(path, clean, "cpu")
    metadata = f'{{"space": "clean", "weights": "{clean.network.sha256}"}}'
    save_file({"mean": torch.zeros(8), "covariance": torch.eye(8)}, path, {"kvbench": metadata})
    why = reason(FidReal(clean, str(path)), "failed", few_pairs[0])
    assert why == f"{path}: 8 features, the network gives 64"


def test_missing_statistics_are_skipped_with_what_to_do(
    tmp_path: Path, clean: Clean, few_pairs: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_WEIGHTS", str(tmp_path))
    for statistics, why in (
        (None, "python -m kvbench.eval.distribution.dataset FOLDER"),
        ("gone", "must name"),
    ):
        assert why in reason(FidReal(clean, statistics), "skipped", few_pairs[0])
    names = [name for space in (Clean(), Adm(), AdmSpatial()) for name in FidReal(space).metrics]
    assert names == ["fid_real_clean", "fid_adm", "sfid_adm"]
    assert FidReal(Adm()).default == MindReal(Adm()).default == dataset.REFERENCE_BATCH


@pytest.mark.slow
def test_sfid_takes_seven_channels_of_a_map(tmp_path: Path, adm: Adm, few_pairs: Pair) -> None:
    file = Path(str(adm.path))
    seen = []
    network = load_inception(file, "cpu")
    network.Mixed_6d.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    stack = few_pairs[0].stack(few_pairs[0].indices[:2])
    with torch.inference_mode():
        found = AdmSpatial().load(file, "cpu")(stack)["features"]
        network(torch.from_numpy(stack).permute(0, 3, 1, 2))
        maps = network.Mixed_6d.branch1x1(seen[0]).numpy()
    assert found.shape == (2, 2023)
    rows = [maps[:, channel, y, x] for y in range(17) for x in range(17) for channel in range(7)]
    assert np.allclose(found, np.stack(rows, 1), atol=1e-6)
    assert found.std() > 0


def test_one_image_is_skipped(tmp_path: Path, clean: Clean, adm: Adm, few_pairs: Pair) -> None:
    one, real = make_set(tmp_path, [pixels("s64_000", "ref")]), str(few_pairs[1].folder / "images")
    for metric in (FidReal(clean, real), PrecisionRecallReal(adm, real), InceptionScore(adm)):
        assert reason(metric, "skipped", one).startswith("too few samples: ")


def test_a_scripted_network_of_unknown_hash_is_not_read(clean: Clean, few_pairs: Pair) -> None:
    unknown = replace(clean, network=replace(clean.network, sha256=None))
    with pytest.raises(WeightError, match="whose code runs when it is read: give its SHA-256"):
        unknown.compute(few_pairs[0], Path(str(clean.path)), "cpu")
