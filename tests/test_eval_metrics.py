"""Paired and distribution metrics against the stored references and independent implementations."""

import hashlib
import json
import math
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.eval.base import Result, evaluate
from kvbench.eval.features import LpipsScenes, SceneFeatures, perceptual_distance, to_unit
from kvbench.eval.fid import INCEPTION, Fid, FidScenes
from kvbench.eval.frechet import frechet_distance, frechet_from_moments
from kvbench.eval.images import ImageSet
from kvbench.eval.paired import ALEXNET, Lpips, Psnr, Ssim, decibels, squared_error, ssim_map
from kvbench.eval.weights import file_sha256

GOLDEN = Path(__file__).parent / "golden" / "eval"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
PAIRS = {pair["name"]: pair for pair in EXPECTED["pairs"]}
JIT_IS_DEPRECATED = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:FutureWarning", "ignore::DeprecationWarning"
)
FEATURES = Path(__file__).parents[1] / "kvbench" / "assets" / "infinity_tiny" / "features.safetensors"


@pytest.fixture(scope="module")
def arrays() -> dict[str, Tensor]:
    return load_file(GOLDEN / "arrays.safetensors")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("network access")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def pixels(name: str, side: str) -> np.ndarray:
    return np.array(Image.open(GOLDEN / side / f"{name}.png"))


def make_set(folder: Path, images: list[np.ndarray]) -> ImageSet:
    (folder / "images").mkdir(parents=True)
    with (folder / "samples.jsonl").open("w") as file:
        for index, image in enumerate(images):
            path = folder / "images" / f"{index:06d}.png"
            Image.fromarray(image).save(path)
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            file.write(json.dumps({"index": index, "seed": 0, "prompt": str(index), "sha256": sha256}) + "\n")
    return ImageSet(folder)


@pytest.fixture(scope="module")
def golden_sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageSet, ImageSet]:
    folder = tmp_path_factory.mktemp("golden")
    cmp, ref = (make_set(folder / side, [pixels(name, side) for name in PAIRS]) for side in ("cmp", "ref"))
    return cmp, ref


def only(evaluator: object, images: ImageSet, reference: ImageSet) -> Result:
    [result] = evaluate([evaluator], images, reference)
    assert result.status == "ok", result.provenance.get("traceback", result.reason)
    return result


# PSNR and SSIM


def test_psnr_equals_the_stored_values(golden_sets: tuple[ImageSet, ImageSet]) -> None:
    result = only(Psnr(), *golden_sets)
    assert result.samples is not None
    assert result.samples["sse"] == [pair["sse"] for pair in PAIRS.values()]
    for found, pair in zip(result.samples["psnr"], PAIRS.values(), strict=True):
        assert found == (math.inf if pair["psnr"] is None else pytest.approx(pair["psnr"], abs=1e-10))
    aggregate = EXPECTED["aggregate"]
    scores = result.scores
    assert scores["psnr"].value == pytest.approx(aggregate["psnr_mean_finite"], abs=1e-10)
    assert scores["psnr"].sd == pytest.approx(aggregate["psnr_std_finite_ddof1"], abs=1e-10)
    assert scores["n_identical"].value == aggregate["psnr_inf"]
    assert "2 of 64 images are identical" in str(result.reason)
    mse = np.array(result.samples["mse"]).reshape(2, 32)
    for size, group in zip((32, 64), mse, strict=True):
        assert decibels(group.mean()) == pytest.approx(aggregate["psnr_of_mean_mse"][str(size)], abs=1e-10)
    assert scores["psnr_mean_mse"].value == pytest.approx(decibels(mse.mean()))


def test_psnr_of_equal_sets_and_of_opposites(tmp_path: Path) -> None:
    black, white = np.zeros((9, 8, 3), np.uint8), np.full((9, 8, 3), 255, np.uint8)
    equal = make_set(tmp_path / "a", [black, white])
    scores = only(Psnr(), equal, equal).scores
    assert (scores["psnr"].value, scores["psnr_mean_mse"].value, scores["n_identical"].value) == (
        None,
        None,
        2,
    )
    opposite = make_set(tmp_path / "b", [white, black])
    assert only(Psnr(), opposite, equal).scores["psnr"].value == 0
    assert squared_error(black, white) == squared_error(white, black) == 9 * 8 * 3 * 255**2


@pytest.mark.parametrize(("double", "tolerance"), [(True, 1e-9), (False, 1e-4)])
def test_ssim_equals_the_stored_values(
    golden_sets: tuple[ImageSet, ImageSet], double: bool, tolerance: float
) -> None:
    result = only(Ssim(batch=5, double=double), *golden_sets)
    assert result.samples is not None
    for column, key in (("ssim", "ssim_gauss_crop"), ("ssim_tm", "ssim_gauss_full")):
        stored = [pair[key] for pair in PAIRS.values()]
        assert result.samples[column] == pytest.approx(stored, abs=tolerance)
        assert result.scores[column].value == pytest.approx(
            EXPECTED["aggregate"][f"{key}_mean"], abs=tolerance
        )


def test_ssim_needs_room_for_its_window() -> None:
    small = np.zeros((1, 10, 20, 3), np.uint8)
    with pytest.raises(ValueError, match="larger than 10 pixels, got 20x10"):
        ssim_map(small, small, "cpu", double=False)


# LPIPS


def golden_maps(image: np.ndarray, arrays: dict[str, Tensor]) -> list[Tensor]:
    """The backbone of the stored values: three 3x3 convolutions of stride 2 behind LPIPS' colour scaling."""
    shift = torch.tensor([-0.030, -0.088, -0.188]).double()[:, None, None]  # LPIPS holds them in float32
    scale = torch.tensor([0.458, 0.448, 0.450]).double()[:, None, None]
    x = (torch.from_numpy(image).permute(2, 0, 1)[None].double() / 127.5 - 1 - shift) / scale
    maps = []
    for layer in range(3):
        weight, bias = (arrays[f"lpips_conv{layer}_{part}"].double() for part in "wb")
        x = F.relu(F.conv2d(x, weight, bias, stride=2, padding=1))
        maps.append(x)
    return maps


def test_perceptual_distance_equals_the_stored_values(arrays: dict[str, Tensor]) -> None:
    heads = [arrays[f"lpips_lin{layer}"].double() for layer in range(3)]
    for name, pair in PAIRS.items():
        maps = [golden_maps(pixels(name, side), arrays) for side in ("ref", "cmp")]
        assert perceptual_distance(*maps, heads).item() == pytest.approx(pair["lpips_tiny"], abs=1e-9)


def test_perceptual_distance_with_equal_weights_is_the_mean_of_angles() -> None:
    rng = torch.Generator().manual_seed(0)
    first, second = ([torch.rand(2, c, 3, 5, generator=rng) for c in (4, 7)] for _ in range(2))
    cosines = [F.cosine_similarity(a, b, dim=1).mean((1, 2)) for a, b in zip(first, second, strict=True)]
    expected = sum(2 - 2 * cosine for cosine in cosines) / 2
    assert torch.allclose(perceptual_distance(first, second), expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning:torchvision")
def test_lpips_runs_on_a_checked_local_trunk(tmp_path: Path, golden_sets: tuple[ImageSet, ImageSet]) -> None:
    from lpips import LPIPS
    from torchvision.models import alexnet

    torch.manual_seed(0)
    trunk = alexnet(weights=None).features
    file = tmp_path / "stand_in.pth"
    torch.save({f"features.{name}": tensor for name, tensor in trunk.state_dict().items()}, file)
    weight = replace(ALEXNET, file=file.name, sha256=file_sha256(file))
    result = only(Lpips(path=str(file), trunk=weight), *golden_sets)
    assert result.provenance["weights"] == {"stand_in.pth": weight.sha256}

    heads = LPIPS(net="alex", pnet_rand=True, verbose=False)
    after_relu = (1, 4, 7, 9, 11)

    def maps(image: np.ndarray) -> list[Tensor]:
        x = heads.scaling_layer(to_unit(image[None]) * 2 - 1)
        found = []
        for layer, module in enumerate(trunk[:12]):
            x = module(x)
            if layer in after_relu:
                found.append(x.clone())  # the pooling behind it works in place
        return found

    with torch.no_grad():
        lins = [lin.model[-1].weight.flatten() for lin in heads.lins]
        names = ["s32_001", "s64_007"]
        expected = [
            perceptual_distance(*(maps(pixels(name, s)) for s in ("cmp", "ref")), lins) for name in names
        ]
    assert result.samples is not None
    found = [result.samples["lpips"][list(PAIRS).index(name)] for name in names]
    assert found == pytest.approx([e.item() for e in expected], rel=1e-4)


# Frechet distance and FID


def test_frechet_distance_equals_the_stored_values(arrays: dict[str, Tensor]) -> None:
    def found(first: Tensor, second: Tensor) -> float:
        return frechet_distance(first.numpy(), second.numpy())

    ref, cmp = arrays["features_ref"], arrays["features_cmp"]
    stored = EXPECTED["fid"]
    assert found(ref, cmp) == pytest.approx(stored["linear16_paired"]["mpmath40"], abs=1e-12)
    assert found(ref[:40], cmp[20:]) == pytest.approx(
        stored["linear16_unpaired_40_44"]["mpmath40"], abs=1e-12
    )
    deficient = found(arrays["rank_deficient_ref"], arrays["rank_deficient_cmp"])
    assert deficient == pytest.approx(stored["rank_deficient_24x48"]["mpmath40"], abs=1e-12)
    assert abs(found(ref, ref)) < 1e-9


@given(
    n=st.integers(2, 30),
    m=st.integers(2, 30),
    dim=st.integers(1, 12),
    seed=st.integers(0, 99),
    shift=st.floats(0, 3),
)
@settings(max_examples=40, deadline=None)
def test_both_routes_agree_and_the_distance_is_a_distance(
    n: int, m: int, dim: int, seed: int, shift: float
) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(n, dim)), rng.normal(shift, 2, size=(m, dim))
    value = frechet_distance(a, b)
    moments = [torch.from_numpy(part) for x in (a, b) for part in (x.mean(0), np.atleast_2d(np.cov(x.T)))]
    assert value == pytest.approx(frechet_from_moments(*moments), abs=1e-6 * (1 + abs(value)))
    assert value == pytest.approx(frechet_distance(b, a), abs=1e-9 * (1 + abs(value)))
    assert value > -1e-9
    assert frechet_distance(a, a + shift) == pytest.approx(dim * shift**2, abs=1e-8)


def test_bad_features_are_refused() -> None:
    good = np.zeros((4, 3))
    with pytest.raises(ValueError, match="at least two samples"):
        frechet_distance(good[:1], good)
    with pytest.raises(ValueError, match="3 and 2 dimensions"):
        frechet_distance(good, good[:, :2])
    bad = good.copy()
    bad[2, 1] = math.nan
    with pytest.raises(ValueError, match="sample 2 are not finite"):
        frechet_distance(good, bad)


class Pooled(nn.Module):
    """Stands in for Inception's layers: 2048 fixed linear features of an 8 x 8 thumbnail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(192, 2048)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.adaptive_avg_pool2d(x, 8).flatten(1))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Pooled()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.fixture
def inception(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / INCEPTION.file
    torch.jit.script(Network()).save(str(path))
    return path


@JIT_IS_DEPRECATED
def test_fid_follows_the_clean_protocol(inception: Path, golden_sets: tuple[ImageSet, ImageSet]) -> None:
    from cleanfid.fid import get_folder_features
    from cleanfid.inception_torchscript import InceptionV3W

    network = replace(INCEPTION, sha256=file_sha256(inception))
    evaluator = Fid(path=str(inception), batch=7, network=network)
    result = only(evaluator, *golden_sets)
    oracle = InceptionV3W(str(inception.parent), download=False, resize_inside=False)
    sides = [
        get_folder_features(
            str(side.folder / "images"),
            oracle,
            num_workers=0,
            device=torch.device("cpu"),
            mode="clean",
            verbose=False,
        )
        for side in golden_sets
    ]
    ours = evaluator.features(golden_sets[0], inception, "cpu")
    np.testing.assert_allclose(ours, sides[0], rtol=1e-5, atol=1e-5)
    assert result.scores["fid_paired_clean"].value == pytest.approx(frechet_distance(*sides), rel=1e-5)
    assert "biased upward" in str(result.reason)
    assert result.provenance["weights"] == {INCEPTION.file: network.sha256}


@JIT_IS_DEPRECATED
def test_fid_of_one_image_is_skipped(inception: Path, tmp_path: Path) -> None:
    one = make_set(tmp_path / "one", [pixels("s64_000", "ref")])
    network = replace(INCEPTION, sha256=file_sha256(inception))
    [result] = evaluate([Fid(path=str(inception), network=network)], one, one)
    assert (result.status, result.scores["fid_paired_clean"].value) == ("skipped", None)
    assert "too few samples" in str(result.reason)


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


def test_scenes_metrics_grow_with_the_damage(tmp_path: Path) -> None:
    reference_images = [pixels(f"s64_{i:03d}", "ref") for i in range(32)]
    reference = make_set(tmp_path / "ref", reference_images)
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(32, 64, 64, 3))
    values = []
    for level in (0, 4, 16, 48):
        damaged = [
            np.clip(i + level * n, 0, 255).astype(np.uint8)
            for i, n in zip(reference_images, noise, strict=True)
        ]
        images = make_set(tmp_path / str(level), damaged)
        results = evaluate([LpipsScenes(str(FEATURES)), FidScenes(str(FEATURES))], images, reference)
        values.append([results[0].scores["lpips_scenes"].value, results[1].scores["fid_scenes"].value])
    assert values[0][0] == 0
    assert abs(values[0][1]) < 1e-9
    assert (np.diff(np.array(values), axis=0) > 0).all()


def test_scenes_metrics_without_weights_are_skipped(
    tmp_path: Path, golden_sets: tuple[ImageSet, ImageSet]
) -> None:
    for evaluator in (
        LpipsScenes(str(tmp_path / "none.safetensors")),
        FidScenes(str(tmp_path / "none.safetensors")),
    ):
        [result] = evaluate([evaluator], *golden_sets)
        assert result.status == "skipped"
        assert "python run.py task=train" in str(result.reason)


def test_another_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a scenes feature network"):
        SceneFeatures.load(GOLDEN / "arrays.safetensors")
