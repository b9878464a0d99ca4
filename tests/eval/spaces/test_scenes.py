"""The scenes feature network: what it was trained on, how well it reads scenes, and that training repeats."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.core import checkpoint
from kvbench.eval.networks import to_unit
from kvbench.eval.spaces.scenes import SceneFeatures
from kvbench.extras.training.features import (
    MAX_COUNT,
    OUTPUTS,
    PAIRS,
    FeatureRecipe,
    labels,
    measure,
    train_features,
)
from kvbench.scenes.world import Object, Scene, render
from tests.support.places import ASSETS

ASSET = ASSETS / "infinity_tiny" / "features.safetensors"
SHORT = FeatureRecipe(steps=3, batch=4, test=8)


def test_labels_count_up() -> None:
    ring = Object("ring", "green", 30, 30, 15)
    scene = Scene((ring, replace(ring, x=70), Object("cross", "red", 30, 70, 15)), "dark")
    found = labels(scene)
    assert found.shape == (OUTPUTS,)
    counts = found[:-1].reshape(len(PAIRS), MAX_COUNT).sum(1)
    assert {PAIRS[i]: counts[i] for i in np.flatnonzero(counts)} == {
        ("green", "ring"): 2,
        ("red", "cross"): 1,
    }
    assert found[PAIRS.index(("green", "ring")) * MAX_COUNT :][:MAX_COUNT].tolist() == [1, 1, 0, 0]
    assert found[-1] == 1
    assert labels(Scene((ring,), "light"))[-1] == 0


def test_shipped_network_reads_new_scenes() -> None:
    network = SceneFeatures.load(ASSET)
    assert measure(network, 200, seed=123)["scenes"] >= 0.98
    scene = Scene((Object("triangle", "cyan", 40, 50, 20),), "light")
    logits = network(to_unit(render(scene)[None]))[0]
    assert ((logits > 0).numpy() == labels(scene)).all()


def test_shipped_file_states_recipe_and_accuracy() -> None:
    tensors, metadata = checkpoint.load(ASSET)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert FeatureRecipe(**metadata["recipe"]) == FeatureRecipe()
    assert metadata["accuracy"]["n"] == FeatureRecipe().test
    assert metadata["accuracy"]["scenes"] >= 0.98


def test_training_repeats_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, again, parts = (tmp_path / f"{name}.safetensors" for name in ("whole", "again", "parts"))
    train_features(whole, SHORT)
    torch.manual_seed(99)  # training looks at its own seed alone
    train_features(again, SHORT)
    assert whole.read_bytes() == again.read_bytes()

    monkeypatch.setattr("kvbench.extras.training.loop.CHECKPOINT_EVERY", 1)
    steps = []

    def stop(*_: object) -> None:
        steps.append(1)
        if len(steps) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kvbench.extras.training.loop.log.info", stop)
        with pytest.raises(KeyboardInterrupt):
            train_features(parts, SHORT)
    train_features(parts, SHORT)
    assert parts.read_bytes() == whole.read_bytes()


def test_features_have_unit_mean_variance_over_scenes(tmp_path: Path) -> None:
    from kvbench.scenes.grammar import TASKS, sample

    rng = np.random.default_rng(7)
    pixels = np.stack([render(sample(rng, TASKS[i % len(TASKS)])[0]) for i in range(300)])
    with torch.inference_mode():
        variance = SceneFeatures.load(ASSET).features(to_unit(pixels)).var(0).mean()
    assert variance == pytest.approx(1, abs=0.15)
