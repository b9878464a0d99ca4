"""Trainings of image models from start to end in a few steps, and the models that they are for."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.utils import instantiate

from kvbench.core.config import ConfigError
from tests.support.small_models import composed

STAGES = "train.transformer.stages=[{_target_: kvbench.training.stages.Stage, scales: 3, batch: 2, steps: 2}]"
FEW = (
    "train.pool=8", "train.compiled=false", "train.threads=1", "train.tokenizer.steps=2", "train.tokenizer.batch=2",
)  # fmt: skip
FREE = "+train.tokenizer.free=1"
SETTINGS = {
    "infinity_tiny": (STAGES, "train.features.steps=1", "train.features.batch=2", "+train.features.test=2"),
    "llamagen_tiny": ("train.transformer.steps=2", "train.transformer.batch=2", FREE),
    "var_tiny": (STAGES, FREE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_training_writes_weights_that_the_model_reads(name: str, tmp_path: Path) -> None:
    config = composed(
        f"model={name}", f"train={name}", f"train.out={tmp_path}", "device=cpu", *FEW, *SETTINGS[name]
    )
    model = instantiate(config.model)
    shipped = {part: source.path for part, source in model.sources.items()}
    assert instantiate(config.train).train(model) == tmp_path
    own = [f"model.sources.{part}.path={tmp_path / Path(path).name}" for part, path in shipped.items()]
    trained = instantiate(composed(f"model={name}", *own).model)
    for one in (model, trained):
        one.load("cpu")
    assert trained.weights_sha256 != model.weights_sha256
    with pytest.raises(
        ConfigError, match=r"^train: the recipe is for a \w+Model; take train=fake for model=fake"
    ):
        instantiate(composed(f"train={name}", f"train.out={tmp_path / 'new'}", "device=cpu").train).train(
            SimpleNamespace(name="fake")
        )
    assert not (tmp_path / "new").exists()
