"""Paired metrics against the stored references and independent implementations."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import file_sha256
from kvbench.eval.networks import to_unit
from kvbench.eval.paired.dists import VGG16, Dists
from kvbench.eval.paired.lpips import ALEXNET, Lpips
from kvbench.eval.paired.ms_ssim import MsSsim, ms_ssim
from kvbench.eval.paired.psnr import Psnr, decibels, squared_error
from kvbench.eval.paired.ssim import Ssim, ssim_map
from kvbench.eval.protocol.intervals import Replicates, assign_groups, bootstrap
from kvbench.eval.spaces.scenes import Scenes, perceptual_distance
from tests.support.image_sets import EXPECTED, FEATURES, PAIRS, golden_pair, make_set, only, pixels, reason

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture(scope="module")
def golden_sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageSet, ImageSet]:
    return golden_pair(tmp_path_factory.mktemp("golden"))


# PSNR and SSIM


def test_psnr_equals_the_stored_values(golden_sets: tuple[ImageSet, ImageSet]) -> None:
    result = only(Psnr(), *golden_sets)
    assert result.samples["sse"] == [pair["sse"] for pair in PAIRS.values()]
    for found, pair in zip(result.samples["psnr"], PAIRS.values(), strict=True):
        assert found == (math.inf if pair["psnr"] is None else pytest.approx(pair["psnr"], abs=1e-10))
    aggregate = EXPECTED["aggregate"]
    scores = result.scores
    assert scores["psnr"].value == pytest.approx(aggregate["psnr_mean_finite"], abs=1e-10)
    assert scores["psnr"].sd == pytest.approx(aggregate["psnr_std_finite_ddof1"], abs=1e-10)
    assert scores["n_identical"].value == aggregate["psnr_inf"]
    assert "2 of 64 images are identical" in str(result.reason)
    assert list(result.entries()) == ["psnr_mean_mse", "psnr", "n_identical"]
    assert [scores[name].n for name in scores] == [64, 62, 64]
    mse = np.array(result.samples["mse"]).reshape(2, 32)
    for size, group in zip((32, 64), mse, strict=True):
        assert decibels(group.mean()) == pytest.approx(aggregate["psnr_of_mean_mse"][str(size)], abs=1e-10)
    assert scores["psnr_mean_mse"].value == pytest.approx(decibels(mse.mean()))


def test_identical_images_have_no_decibels_and_others_keep_their_prompts(tmp_path: Path) -> None:
    """Of six images the first two are identical; the others are of two prompts."""
    changes, prompts = (0, 0, 1, 2, 9, 155), ["a", "b", "c", "c", "d", "d"]
    made, grey = (
        make_set(tmp_path / name, [np.full((9, 8, 3), 100 + by, np.uint8) for by in levels], prompts)
        for name, levels in (("made", changes), ("grey", [0] * 6))
    )
    scores = only(Psnr(), made, grey).scores
    expected = bootstrap([float(decibels(np.array([by**2]))[0]) for by in changes[2:]], prompts[2:])
    assert scores["psnr"].ci95 == pytest.approx((expected.low, expected.high))
    assert [score.value for score in only(Psnr(), grey, grey).scores.values()] == [None, None, 6]
    errors, dealt = np.square(changes), assign_groups(prompts)
    without = [float(decibels(errors[dealt != group].mean())) for group in range(dealt.max() + 1)]
    mean = scores["psnr_mean_mse"]
    assert mean.replicates == Replicates.from_groups(np.array(without), prompts)
    expected = bootstrap(errors.tolist(), prompts, decibels)
    assert mean.ci95 == pytest.approx((expected.low, expected.high))
    black, white = np.zeros((9, 8, 3), np.uint8), np.full((9, 8, 3), 255, np.uint8)
    assert squared_error(black, white) == squared_error(white, black) == 9 * 8 * 3 * 255**2


@pytest.mark.parametrize(("double", "tolerance"), [(True, 1e-9), (False, 1e-4)])
def test_ssim_equals_goldens(golden_sets: tuple[ImageSet, ImageSet], double: bool, tolerance: float) -> None:
    result = only(Ssim(batch=5, double=double), *golden_sets)
    for column, key in (("ssim", "ssim_gauss_crop"), ("ssim_tm", "ssim_gauss_full")):
        expected = [pair[key] for pair in PAIRS.values()]
        assert result.samples[column] == pytest.approx(expected, abs=tolerance)
        assert result.scores[column].value == pytest.approx(
            EXPECTED["aggregate"][f"{key}_mean"], abs=tolerance
        )


def test_ssim_may_be_negative_and_its_interval_ends_at_its_range(tmp_path: Path) -> None:
    """An image equals its reference, another one is its reference's negative."""
    noise = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3)).astype(np.uint8)
    sides = make_set(tmp_path / "ours", [noise[0], 255 - noise[1]]), make_set(tmp_path / "theirs", [*noise])
    result = only(Ssim(double=True), *sides)
    assert result.samples["ssim"][1] < -0.5
    score = result.scores["ssim"]
    assert score.ci95 == (-1, 1)
    assert str(score.ci).endswith(", cut at [-1, 1]")


def test_small_images_have_no_room_for_windows_and_scales(golden_sets: tuple[ImageSet, ImageSet]) -> None:
    small = np.zeros((1, 10, 20, 3), np.uint8)
    with pytest.raises(ValueError, match="larger than 10 pixels, got 20x10"):
        ssim_map(small, small, "cpu", double=False)
    with pytest.raises(ValueError, match="needs 176 pixels a side, got 20x10"):
        ms_ssim(small, small, "cpu", double=True)
    why = reason(MsSsim(), "skipped", *golden_sets)
    assert why == "64 of 64 images are smaller than 176 pixels, which five scales need"


# LPIPS


def test_perceptual_distance_with_equal_weights_is_the_mean_of_angles() -> None:
    rng = torch.Generator().manual_seed(0)
    first, second = ([torch.rand(2, c, 3, 5, generator=rng) for c in (4, 7)] for _ in range(2))
    cosines = [F.cosine_similarity(a, b, dim=1).mean((1, 2)) for a, b in zip(first, second, strict=True)]
    expected = sum(2 - 2 * cosine for cosine in cosines) / 2
    assert torch.allclose(perceptual_distance(first, second), expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning:torchvision")
def test_lpips_is_that_of_its_authors(tmp_path: Path, golden_sets: tuple[ImageSet, ImageSet]) -> None:
    from lpips import LPIPS

    official = LPIPS(net="alex", pnet_rand=True, verbose=False).eval()
    file = tmp_path / "stand_in.pth"
    trunk = official.net.state_dict().items()  # by slices of the network's layers
    torch.save({f"features.{name.partition('.')[2]}": tensor for name, tensor in trunk}, file)
    weight = replace(ALEXNET, file=file.name, sha256=file_sha256(file))
    result = only(Lpips(path=str(file), trunk=weight), *golden_sets)
    assert result.provenance["weights"] == {"stand_in.pth": weight.sha256}
    for name in ("s32_001", "s64_007"):
        sides = (to_unit(pixels(name, side)[None]) * 2 - 1 for side in ("cmp", "ref"))
        with torch.no_grad():
            expected = official(*sides).item()
        assert result.samples["lpips"][list(PAIRS).index(name)] == pytest.approx(expected, rel=1e-4)


def test_networks_run_without_tf32(
    golden_sets: tuple[ImageSet, ImageSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    convolve = F.conv2d

    def watch(*arguments: object, **more: object) -> Tensor:
        seen.append(torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)
        return convolve(*arguments, **more)

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(F, "conv2d", watch)
    space = Scenes(path=str(FEATURES))
    for compute in (
        partial(only, Ssim(), *golden_sets),
        partial(space.compute, golden_sets[0], FEATURES, "cpu"),
        partial(space._compute_pair, *golden_sets, FEATURES, "cpu"),
    ):
        seen.clear()
        compute()
        assert seen
        assert not any(seen)
        assert torch.backends.cudnn.allow_tf32


# MS-SSIM and DISTS


def slow_ms_ssim(x: np.ndarray, y: np.ndarray) -> float:
    """Wang et al. (2003) in float64 with scipy's filter, borders reflected, and torchmetrics' float32 exponents."""
    from scipy.ndimage import gaussian_filter

    def blur(plane: np.ndarray) -> np.ndarray:
        return gaussian_filter(plane, 1.5, mode="mirror", radius=5, axes=(0, 1))

    a, b, terms = x.astype(np.float64), y.astype(np.float64), []
    for scale in range(5):
        if scale:
            a, b = (z.reshape(len(z) // 2, 2, z.shape[1] // 2, 2, 3).mean((1, 3)) for z in (a, b))
        mean_a, mean_b = blur(a), blur(b)
        var_a, var_b = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2
        cov = blur(a * b) - mean_a * mean_b
        contrast = (2 * cov + 58.5225) / (var_a + var_b + 58.5225)
        whole = contrast * (2 * mean_a * mean_b + 6.5025) / (mean_a**2 + mean_b**2 + 6.5025)
        terms.append(contrast[5:-5, 5:-5].mean())
    terms[-1] = whole.mean()
    exponents = np.array([0.0448, 0.2856, 0.3001, 0.2363, 0.1333], np.float32).astype(np.float64)
    return float(np.prod(np.maximum(terms, 0) ** exponents))


def enlarged(name: str, side: str) -> np.ndarray:
    """The smallest image that five scales accept."""
    return pixels(name, side).repeat(3, 0).repeat(3, 1)[:176, :176]


@pytest.mark.parametrize(("double", "tolerance"), [(True, 1e-9), (False, 1e-4)])
def test_ms_ssim_follows_its_definition(tmp_path: Path, double: bool, tolerance: float) -> None:
    names = ["s64_000", "s64_003", "s32_000"]
    sides = [make_set(tmp_path / side, [enlarged(name, side) for name in names]) for side in ("cmp", "ref")]
    result = only(MsSsim(batch=1, double=double), *sides)
    expected = [slow_ms_ssim(enlarged(name, "cmp"), enlarged(name, "ref")) for name in names[:2]]
    assert result.samples == {"index": [0, 1], "ms_ssim": pytest.approx(expected, abs=tolerance)}
    assert result.scores["ms_ssim"].value == pytest.approx(np.mean(expected), abs=tolerance)
    assert result.scores["ms_ssim"].n == 2
    assert result.reason == "1 of 3 images are smaller than 176 pixels, which five scales need"


@pytest.mark.slow
def test_dists_equals_torchmetrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchmetrics.functional.image import dists as oracle
    from torchvision.models import vgg

    torch.manual_seed(0)
    trunk = vgg.make_layers(vgg.cfgs["D"])
    for module in trunk:
        if isinstance(module, torch.nn.Conv2d):  # keep the variance of the signal through 13 layers
            torch.nn.init.kaiming_normal_(module.weight)
    file = tmp_path / "vgg.pth"
    torch.save({f"features.{name}": tensor for name, tensor in trunk.state_dict().items()}, file)
    weight = replace(VGG16, file=file.name, sha256=file_sha256(file))
    names = [*list(PAIRS)[29:31], *list(PAIRS)[32:35]]  # 32 pixels, the second pair equal, then 64 pixels
    sides = golden_pair(tmp_path, names)
    found = only(Dists(path=str(file), batch=2, trunk=weight), *sides)
    monkeypatch.setattr(oracle, "vgg16", lambda weights: SimpleNamespace(features=trunk))
    monkeypatch.setattr(oracle.torch, "load", partial(torch.load, weights_only=True))
    network = oracle.DISTSNetwork()
    with torch.no_grad():
        stacks = [to_unit(side.stack(side.indices[2:])) for side in sides]
        expected = network(*stacks).tolist()
    assert found.samples["dists"][2:] == pytest.approx(expected, abs=2e-5)
    assert abs(found.samples["dists"][1]) < 1e-6  # equal images
    assert found.provenance["weights"]["vgg.pth"] == weight.sha256
