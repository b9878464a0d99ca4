"""Spaces on random networks, against their authors' programs or slow re-derivations, and CMMD itself."""

import io
import json
import math
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.random import Generator
from PIL import Image
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import functional as F

from kvbench.eval.distribution.cmmd import Cmmd, CmmdReal
from kvbench.eval.distribution.fid import Fid
from kvbench.eval.distribution.frechet import frechet_distance
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import file_sha256
from kvbench.eval.paired.dreamsim import DreamSim
from kvbench.eval.protocol.base import evaluate
from kvbench.eval.protocol.intervals import assign_groups
from kvbench.eval.spaces.clip import ClipImages
from kvbench.eval.spaces.dinov2 import VIT_L_14, Dinov2
from kvbench.eval.spaces.dreamsim import DINO, ENSEMBLE, DreamSimEmbeddings
from kvbench.eval.spaces.efficientnet import LITE0, EfficientNetLite0
from tests.support.image_sets import GOLDEN, make_set, only, reason
from tests.support.marks import needs
from tests.support.tiny import MODEL, make_golden_weight, tiny_clip

pytestmark = [pytest.mark.usefixtures("offline"), needs("open_clip", "timm")]
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


def test_other_networks_are_refused(dinov2: Dinov2, tmp_path: Path, pair: tuple[ImageSet, ImageSet]) -> None:
    torch.save({"pos_embed": torch.zeros(1, 1370, 48), "norm.weight": torch.zeros(48)}, tmp_path / "a.pth")
    for space, name in ((dinov2, SMALL), (EfficientNetLite0(), LITE)):
        other = replace(space, path=str(tmp_path / "a.pth"), network=replace(space.network, sha256=None))
        assert f"does not hold a {name}" in reason(Fid(other), "failed", *pair)


META = json.loads((GOLDEN / "dreamsim.json").read_text())
STORED = load_file(GOLDEN / "dreamsim.safetensors")
IMAGES = list(STORED["images"].numpy())
PAIRS = [(0, 1), (1, 2), (2, 3), (3, 0)]


def states(part: str) -> dict[str, Tensor]:
    return {name: make_golden_weight(f"{part}.{name}", shape) for name, shape in META["shapes"][part].items()}


def packed(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def make_space(folder: Path, *, pickled: bool = False, **settings: object) -> DreamSimEmbeddings:
    """The space on the golden networks, with an adapter in either of peft's formats."""
    torch.save(states("dino"), folder / DINO.file)
    config = {"lora_alpha": META["lora_alpha"], "r": META["r"], "use_dora": False, **settings}
    with zipfile.ZipFile(folder / ENSEMBLE.file, "w") as members:
        members.writestr("ensemble_lora/adapter_config.json", json.dumps(config))
        kind, content = ("bin", packed(states("lora"))) if pickled else ("safetensors", save(states("lora")))
        members.writestr(f"ensemble_lora/adapter_model.{kind}", content)
        for part in ("clip", "open_clip"):
            members.writestr(f"{part}_vitb16_pretrain.pth.tar", packed({"state_dict": states(part)}))
    paths = (str(folder / ENSEMBLE.file), str(folder / DINO.file))
    return DreamSimEmbeddings(path=paths[0], trunk_path=paths[1], heads=4, batch=3)


@pytest.mark.parametrize("pickled", [False, True])
def test_embeddings_and_distances_are_those_of_the_authors(pickled: bool, tmp_path: Path) -> None:
    space = make_space(tmp_path, pickled=pickled)
    ours, theirs = (make_set(tmp_path / str(side), [IMAGES[pair[side]] for pair in PAIRS]) for side in (0, 1))
    features = space.features(ours, "cpu").arrays["features"]
    expected = STORED["embeddings"][[pair[0] for pair in PAIRS]].numpy()
    assert np.abs(features - expected).max() < 2e-6
    result = only(DreamSim(space), ours, theirs)
    assert result.samples["dreamsim[ensemble]"] == pytest.approx(STORED["distances"].tolist(), abs=2e-6)
    assert result.scores["dreamsim[ensemble]"].value == pytest.approx(
        float(STORED["distances"].mean()), abs=2e-6
    )
    assert result.provenance["features"] == {"images": "reused", "reference": "computed"}
    same = only(DreamSim(space), ours, ours)
    assert same.samples["dreamsim[ensemble]"] == [0] * 4


def test_other_files_are_refused(tmp_path: Path) -> None:
    run = make_set(tmp_path / "run", IMAGES)
    space = make_space(tmp_path, use_rslora=True)
    assert "sets use_rslora, which is not supported" in reason(DreamSim(space), "failed", run, run)
    space = make_space(tmp_path)
    torch.save(states("clip"), tmp_path / DINO.file)
    assert "does not hold DreamSim's ensemble" in reason(DreamSim(space), "failed", run, run)
    (tmp_path / ENSEMBLE.file).write_text("no archive")
    assert "does not hold DreamSim's ensemble" in reason(DreamSim(space), "failed", run, run)
