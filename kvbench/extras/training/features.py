"""Training of the feature network of scenes, which counts the objects of every colour and shape."""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from kvbench.core import checkpoint
from kvbench.eval.networks import to_unit
from kvbench.eval.spaces.scenes import SceneFeatures
from kvbench.extras.training.loop import Recipe, fit, generator
from kvbench.scenes.grammar import PAIRS, TASKS, sample
from kvbench.scenes.world import SIDE, Scene, render

log = logging.getLogger(__name__)

MAX_COUNT = 4  # maximum number of objects of one colour and shape in a scene
OUTPUTS = len(PAIRS) * MAX_COUNT + 1  # counts of all pairs, and the background


@dataclass(frozen=True)
class FeatureRecipe(Recipe):
    """Settings of the feature network's training; see `Recipe` for the other settings.

    Attributes:
        steps: optimiser steps.
        batch: new scenes per step.
        noise: maximum standard deviation of the noise added to an image, which is uniform on [0, noise].
        shift: maximum shift of the images in pixels, so that layouts are not memorised.
        test: number of scenes for the accuracy.
    """

    outer: ClassVar[tuple[str, ...]] = ("layers.0", "head")
    steps: int = 700
    batch: int = 64
    muon: float = 0.03
    adamw: float = 3e-3
    average: float = 0.99
    noise: float = 0.08
    shift: int = 5
    test: int = 2000


def labels(scene: Scene) -> NDArray[np.float32]:
    """Return the targets of a scene, float32 [121] of zeros and ones.

    Entry k of the four entries of a pair of colour and shape is 1 if the scene has at least k such objects; the last
    entry is 1 if the background is dark.
    """
    counts = [sum((item.color, item.shape) == pair for item in scene.objects) for pair in PAIRS]
    steps = np.arange(1, MAX_COUNT + 1)[None] <= np.array(counts)[:, None]
    return np.append(steps.ravel(), scene.background == "dark").astype(np.float32)


def train_features(path: Path, recipe: FeatureRecipe, device: str = "cpu") -> dict[str, float]:
    """Train the network, write it to `path` (float16 safetensors) and return its accuracy on new scenes.

    An interrupted training resumes from a checkpoint in the same folder.

    Raises:
        ValueError, FloatingPointError: see `fit`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = SceneFeatures(OUTPUTS)
    model.to(device)

    def loss(step: int) -> Tensor:
        images, targets = _draw(recipe.batch, [recipe.seed, 2, step])
        disturbed = _disturb(images, recipe, step).to(device)
        return F.binary_cross_entropy_with_logits(model(disturbed), targets.to(device))

    model.load_state_dict(fit("features", model, recipe, loss, path.with_suffix(".checkpoint.safetensors")))
    model.cpu()
    _rescale(model, recipe)
    half = {name: tensor.half() for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: tensor.float() for name, tensor in half.items()})
    accuracy = measure(model, recipe.test, recipe.seed)
    checkpoint.save(path, half, {"recipe": asdict(recipe), "accuracy": accuracy})
    log.info("features: %s, accuracy %s", path, accuracy)
    return accuracy


@torch.inference_mode()
def measure(model: SceneFeatures, count: int, seed: int) -> dict[str, float]:
    """Return the share of new scenes with all outputs correct, with correct counts, and with correct background."""
    correct = torch.zeros(count, 2, dtype=torch.bool)
    for start in range(0, count, 100):
        size = min(100, count - start)
        images, targets = _draw(size, [seed, 3, start])
        agree = (model(images) > 0) == (targets > 0.5)
        correct[start : start + size] = torch.stack([agree[:, :-1].all(1), agree[:, -1]], 1)
    counts, background = correct.float().mean(0).tolist()
    scenes = float(correct.all(1).float().mean())
    return {"scenes": scenes, "counts": counts, "background": background, "n": count}


@torch.no_grad()
def _rescale(model: SceneFeatures, recipe: FeatureRecipe) -> None:
    """Scale the features in place to unit mean variance over scenes, without changing the logits."""
    images, _ = _draw(recipe.test, [recipe.seed, 5])
    parts = [model.features(images[start : start + 100]) for start in range(0, recipe.test, 100)]
    scale = torch.cat(parts).var(0).mean().sqrt()
    # ReLU stages are homogeneous: dividing the input and the biases divides the output.
    last = model.get_submodule(f"layers.{len(model.layers) - 1}")
    for name, parameter in last.named_parameters():
        if name != "refine.weight":
            parameter.div_(scale)
    model.head.weight.mul_(scale)


def _draw(size: int, key: list[int]) -> tuple[Tensor, Tensor]:
    """Sample scenes of any task: images float32 [size, 3, 96, 96] in [0, 1] and labels float32 [size, 121]."""
    rng = np.random.default_rng(key)
    pixels = np.empty((size, SIDE, SIDE, 3), np.uint8)
    targets = np.empty((size, OUTPUTS), np.float32)
    for row in range(size):
        scene, _, _ = sample(rng, TASKS[int(rng.integers(len(TASKS)))], pairs=PAIRS)
        pixels[row], targets[row] = render(scene), labels(scene)
    return to_unit(pixels), torch.from_numpy(targets)


def _disturb(images: Tensor, recipe: FeatureRecipe, step: int) -> Tensor:
    """Shift images [B, 3, H, W] cyclically (borders are background); add noise of a random deviation to each image."""
    rng = generator(recipe.seed, 4, step)
    dy, dx = torch.randint(-recipe.shift, recipe.shift + 1, (2,), generator=rng).tolist()
    strength = torch.rand(len(images), 1, 1, 1, generator=rng) * recipe.noise
    return images.roll((dy, dx), (2, 3)) + strength * torch.randn(images.shape, generator=rng)
