"""Networks of evaluators on a GPU that is not there: a batch of images goes in, scores or features stay on the device.

Real architectures, with tensors of the right names and shapes instead of weight files.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from kvbench.eval.alignment import clip as clips
from kvbench.eval.alignment.hps import Hps
from kvbench.eval.files.weights import Weight
from kvbench.eval.networks import to_unit
from kvbench.eval.paired.dists import DistsNetwork
from kvbench.eval.paired.lpips import alex
from kvbench.eval.paired.ms_ssim import MsSsim
from kvbench.eval.paired.ssim import Ssim
from kvbench.eval.spaces import dinov2
from kvbench.eval.spaces.inception import Adm, AdmSpatial
from kvbench.eval.spaces.scenes import SceneFeatures, Scenes, perceptual_distance
from tests.support.fake_device import CUDA

PIXELS = np.zeros((2, 64, 80, 3), np.uint8)
SMALL = "vit_small_patch14_dinov2"
FILE, DEVICE = Path("weights.pth"), str(CUDA)


def blank(x: Tensor) -> Tensor:
    """A tensor like it whose numbers fake mode does not remember."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def replace_tensors(network: nn.Module, change: Callable[[Tensor], Tensor], **_: object) -> nn.Module:
    """What `Module.to` and its like do; torch's own swaps tensors, which those without numbers do not allow."""
    for owner in network.modules():
        for name, value in owner._parameters.items():
            owner._parameters[name] = None if value is None else nn.Parameter(change(blank(value)))
        for name, buffer in owner._buffers.items():
            owner._buffers[name] = None if buffer is None else change(blank(buffer))
    return network


@pytest.fixture(autouse=True)
def no_numbers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(nn.Module, "_apply", replace_tensors)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        yield


def hold(found: Mapping[str, Tensor], widths: Mapping[str, int]) -> None:
    """The output of a space is float32 on the device."""
    shapes = {name: (2, width) for name, width in widths.items()}
    assert {name: tuple(x.shape) for name, x in found.items()} == shapes
    assert {(x.device, x.dtype) for x in found.values()} == {(CUDA, torch.float32)}


def give(monkeypatch: pytest.MonkeyPatch, state: Mapping[str, Tensor]) -> None:
    """Files hold these tensors."""
    monkeypatch.setattr(torch, "load", lambda *_, **__: state)


def test_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SceneFeatures, "load", lambda _: SceneFeatures(121).eval())
    hold(Scenes().load(FILE, DEVICE)(PIXELS), {"features": 64})
    stages = SceneFeatures(121).to(CUDA).stages(to_unit(PIXELS, DEVICE))
    hold({"distance": perceptual_distance(stages, stages)[:, None]}, {"distance": 1})


@pytest.mark.parametrize(
    ("space", "widths"),
    [(Adm(), {"features": 2048, "logits": 1008}), (AdmSpatial(), {"features": 7 * 17 * 17})],
    ids=["adm", "adm_spatial"],
)
def test_inception(space: Adm, widths: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    inception = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    monkeypatch.setattr(inception.FeatureExtractorInceptionV3, "load_state_dict", lambda *_: None)
    give(monkeypatch, {})
    hold(space.load(FILE, DEVICE)(PIXELS), widths)


@pytest.mark.slow
def test_dinov2(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm")
    with unset_fake_temporarily():  # timm reads numbers
        give(monkeypatch, timm.create_model(SMALL, num_classes=0, img_size=518).state_dict())
        network = dinov2.load_dinov2(SMALL, FILE)
    monkeypatch.setattr(dinov2, "load_dinov2", lambda *_: network)
    hold(dinov2.Dinov2(model=SMALL).load(FILE, DEVICE)(PIXELS), {"features": 384})


@pytest.mark.slow
@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize(
    ("scorer", "quick_gelu"), [(clips.ClipScore(), True), (Hps(), False)], ids=["clip", "hps"]
)
def test_scores_of_prompts(
    scorer: clips.ClipScore | Hps, quick_gelu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_clip = pytest.importorskip("open_clip")
    state = open_clip.create_model(scorer.model, load_weights=False, force_quick_gelu=quick_gelu).state_dict()
    monkeypatch.setattr(clips, "read_state", lambda *_, **__: state)
    monkeypatch.setattr(Weight, "require", lambda _: (FILE, ""))
    score, _ = scorer.load(DEVICE)
    hold({"score": score(PIXELS, ["a cat", "a dog"])[:, None]}, {"score": 1})


def test_dists(monkeypatch: pytest.MonkeyPatch) -> None:
    vgg16 = pytest.importorskip("torchvision").models.vgg16
    mixture = {name: torch.empty(1, 1475, 1, 1) for name in ("alpha", "beta")}
    give(monkeypatch, mixture | vgg16().state_dict())
    network, images = DistsNetwork.load(FILE, FILE).to(CUDA), to_unit(PIXELS, DEVICE)
    hold({"dists": network(images, images)[:, None]}, {"dists": 1})


@pytest.mark.filterwarnings("ignore::UserWarning:torchvision")
def test_lpips(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lpips")
    alexnet = pytest.importorskip("torchvision").models.alexnet()
    give(monkeypatch, alexnet.state_dict())
    network, images = alex(FILE).to(DEVICE), to_unit(PIXELS, DEVICE)
    hold({"lpips": network(images, images, normalize=True).flatten()[:, None]}, {"lpips": 1})


@pytest.mark.parametrize("metric", [Ssim(), MsSsim(), Ssim(double=True)], ids=repr)
def test_structure(metric: Ssim | MsSsim) -> None:
    images = np.zeros((2, 192, 208, 3), np.uint8)
    dtype = torch.float64 if metric.double else torch.float32
    for values in metric.load(DEVICE)[0](images, images):
        assert (values.shape, values.device, values.dtype) == ((2,), CUDA, dtype)
