"""Trainings of image models from start to end in a few steps."""

from pathlib import Path

import pytest
from hydra.utils import instantiate

from tests.support.small_models import composed

STAGE = "{_target_: kvbench.extras.training.transformer.Stage, scales: 3, batch: 2, steps: 2}"
STAGES = f"train.transformer.stages=[{STAGE}]"
FEW = (
    "train.pool=8", "train.compiled=false", "train.threads=1", "train.tokenizer.steps=2", "train.tokenizer.batch=2",
)  # fmt: skip
FREE = "+train.tokenizer.free=1"
SMALL = {
    "infinity_tiny": (
        "model.transformer.depth=1", "model.text_layers=1", "model.tokenizer.mixers=1", "model.tokenizer.base=32",
        "model.tokenizer.encoder_widths=[32,32]", "model.tokenizer.decoder_widths=[32,32]",
    ),
    "llamagen_tiny": ("model.transformer.depth=1", "model.text_layers=1", "model.tokenizer.widths=[32,32]"),
    "var_tiny": ("model.transformer.depth=1", "model.tokenizer.widths=[32,32]"),
}  # fmt: skip
"""Of the same classes as the model that the recipe is for."""
SETTINGS = {
    "infinity_tiny": (STAGES, "train.features.steps=1", "train.features.batch=2", "+train.features.test=2"),
    "llamagen_tiny": ("train.transformer.steps=2", "train.transformer.batch=2", FREE),
    "var_tiny": (STAGES, FREE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_training_writes_weights_that_the_model_reads(name: str, tmp_path: Path) -> None:
    small = (f"model={name}", *SMALL[name])
    config = composed(*small, f"train={name}", f"train.out={tmp_path}", "device=cpu", *FEW, *SETTINGS[name])
    model, shipped = instantiate(config.model), instantiate(composed(f"model={name}").model)
    assert instantiate(config.train).train(model) == tmp_path
    own = [
        f"model.sources.{part}.path={tmp_path / Path(source.path).name}"
        for part, source in shipped.sources.items()
    ]
    trained = instantiate(composed(*small, *own).model)
    for one in (shipped, trained):
        one.load("cpu")
    assert trained.weights_sha256 != shipped.weights_sha256
