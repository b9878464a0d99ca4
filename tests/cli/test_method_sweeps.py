"""Sweeps over every method: they name all that fit the model and a budget, and each job composes."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kvbench.cli.config.messages import check_arguments
from tests.support.methods import class_of, methods_for
from tests.support.places import ROOT

SWEEPS = sorted((ROOT / "conf" / "sweeps" / "methods").glob("*.yaml"))
NO_BUDGET = {"ams_kv", "scale_groups", "diagonal", "sta", "sparvar", "quest"}
"""Methods that hold what their rule says, or everything."""
OF_SCALES = {"first_scales", "heatkv", "heatkv_naive", "binary_heatkv", "binary_heatkv_naive"}
"""Methods by scales, which elsewhere are rows of an image or parts of a text; `heatkv` stands for them there."""
LEFT_OUT = {
    "infinity_tiny": NO_BUDGET | {"binary_heatkv_naive"},
    "llamagen_tiny": NO_BUDGET | OF_SCALES | {"hard_kv"},
    "reasoner_tiny": NO_BUDGET | OF_SCALES | {"ssd"},
}


def methods_of(path: Path) -> set[str]:
    return set(OmegaConf.load(path).hydra.sweeper.params.method.split(","))


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_method_that_fits_is_there(path: Path) -> None:
    family = "next-scale" if path.stem == "infinity_tiny" else "next-token"
    own = {name for name in methods_for(family) if class_of(name).__module__.startswith("kvbench.")}
    named = {name for name in methods_of(path) if "/" not in name} - {"heatkv"}
    assert named == own - LEFT_OUT[path.stem] - {"heatkv"}


@pytest.mark.slow
def test_every_method_composes() -> None:
    """With the model of the first sweep that has it; with those of the others it composes alike."""
    seen: set[str] = set()
    for path in SWEEPS:
        methods = methods_of(path)
        shared = OmegaConf.load(path).hydra.sweeper.params
        words = {**shared, "method": ",".join(sorted(methods - seen))}
        assert check_arguments([f"{key}={value}" for key, value in words.items()]) is None
        seen |= methods
