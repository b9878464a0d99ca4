"""LAION's aesthetic predictor on a tiny random CLIP, against the authors' layers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from kvbench.eval.alignment.aesthetic import METRIC, Aesthetic
from tests.support.image_sets import make_noise, only, reason
from tests.support.marks import needs
from tests.support.tiny import MODEL, tiny_clip

pytestmark = [pytest.mark.usefixtures("offline"), needs("open_clip")]


@torch.no_grad()
def test_ratings_are_those_of_the_authors_layers(tmp_path: Path) -> None:
    import open_clip

    weight = tiny_clip(tmp_path)
    layers = nn.Sequential(
        *(nn.Linear(8, 12), nn.Dropout(0.2), nn.Linear(12, 6), nn.Dropout(0.2)),
        *(nn.Linear(6, 5), nn.Dropout(0.1), nn.Linear(5, 4), nn.Linear(4, 1)),
    ).eval()
    path = tmp_path / "head.pth"
    torch.save({f"layers.{name}": value for name, value in layers.state_dict().items()}, path)
    images = make_noise(tmp_path / "run", [{}] * 5, ["0", "0", "1", "1", "2"])
    evaluator = Aesthetic(str(path), weight.path, batch=2, model=MODEL, network=weight)
    result = only(evaluator, images)
    network = open_clip.create_model(MODEL, pretrained=weight.path, force_quick_gelu=True).eval()
    transform = open_clip.image_transform(28, is_train=False)
    expected = []
    for index in images.indices:
        vector = network.encode_image(transform(Image.fromarray(images.image(index)))[None])
        expected.append(float(layers(vector / vector.norm())))
    assert result.samples[METRIC] == pytest.approx(expected, abs=1e-5)
    assert np.std(expected) > 1e-3
    assert result.scores[METRIC].value == pytest.approx(np.mean(expected), abs=1e-5)
    assert len(result.provenance["weights"]) == 2
    torch.save({"layers.0.weight": torch.zeros(2, 2)}, path)
    assert "does not hold LAION's aesthetic predictor: it has no layers.0.bias" in reason(
        evaluator, "failed", images
    )
