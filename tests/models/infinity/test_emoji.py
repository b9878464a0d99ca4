"""The shipped model of pictures draws what its prompts name."""

import numpy as np
import pytest

from kvbench.extras.training.pictures import BACKGROUNDS
from kvbench.models.noise import PromptNoise
from tests.support.small_models import configured, full


@pytest.mark.parametrize(
    ("name", "channel"), [("red apple", 0), pytest.param("broccoli", 1, marks=pytest.mark.slow)]
)
def test_backgrounds_and_colours_are_the_named_ones(name: str, channel: int) -> None:
    model = configured("model=infinity_emoji")
    model.load("cpu")
    prompts = [f"{name} on {colour}" for colour in BACKGROUNDS]
    images = model.generate(prompts, full(model), PromptNoise(0, range(len(prompts))))
    for image, colour in zip(np.asarray(images, np.float32), BACKGROUNDS.values(), strict=True):
        edge = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
        assert np.abs(np.median(edge, 0) - colour).max() < 12
        others = np.delete(image, channel, -1).max(-1)
        assert (image[..., channel] > others + 40).mean() > 0.1
