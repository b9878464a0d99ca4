"""The scenes feature network: what it was trained on, how well it reads scenes, and that training repeats."""

import itertools
from pathlib import Path

import pytest
import torch

from kvbench.core import checkpoint
from kvbench.eval.networks import to_unit
from kvbench.eval.spaces.scenes import SceneFeatures
from kvbench.extras.training.features import (
    FeatureRecipe,
    labels,
    measure,
    train_features,
)
from kvbench.scenes.world import Object, Scene, render
from tests.support.places import ASSETS

ASSET = ASSETS / "infinity_tiny" / "features.safetensors"
SHORT = FeatureRecipe(steps=3, batch=4, test=8)


def test_shipped_network_reads_new_scenes_and_states_its_recipe() -> None:
    network = SceneFeatures.load(ASSET)
    assert measure(network, 200, seed=123)["scenes"] >= 0.98
    scene = Scene((Object("triangle", "cyan", 40, 50, 20),), "light")
    logits = network(to_unit(render(scene)[None]))[0]
    assert ((logits > 0).numpy() == labels(scene)).all()
    _, metadata = checkpoint.load(ASSET)
    assert FeatureRecipe(**metadata["recipe"]) == FeatureRecipe()
    assert metadata["accuracy"]["scenes"] >= 0.98


def test_training_repeats_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, again, parts = (tmp_path / f"{name}.safetensors" for name in ("whole", "again", "parts"))
    train_features(whole, SHORT)
    torch.manual_seed(99)  # training looks at its own seed alone
    train_features(again, SHORT)
    assert whole.read_bytes() == again.read_bytes()

    monkeypatch.setattr("kvbench.extras.training.loop.CHECKPOINT_EVERY", 1)
    logged = itertools.count(1)

    def stop(*_: object) -> None:
        if next(logged) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kvbench.extras.training.loop.log.info", stop)
        with pytest.raises(KeyboardInterrupt):
            train_features(parts, SHORT)
    train_features(parts, SHORT)
    assert parts.read_bytes() == whole.read_bytes()
