"""Presets of sampling and the sweeps that measure full caches: each fits its models, and others are refused."""

import re
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from kvbench.cli.config.checks import check_preset
from kvbench.cli.config.compose import compose_job, hydra_of_kvbench, read_settings
from kvbench.core.config import ConfigError
from kvbench.report.papers.published import find, model_of
from tests.cli.test_conf import read_sweep
from tests.support.places import ROOT

CONF = ROOT / "conf"
PRESETS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((CONF / "sampling").glob("*.yaml"))}
MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
SWEEPS = sorted((CONF / "sweeps" / "baselines").glob("*.yaml"))


@pytest.fixture(autouse=True)
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def compose_model(*overrides: str) -> Mapping[str, Any]:
    """The part `model` of a command's configuration, as JSON values."""
    with hydra_of_kvbench():
        config, _ = compose_job(list(overrides))
        read_settings(config)
    model = OmegaConf.to_container(config.model, resolve=True)
    assert isinstance(model, dict)
    return {str(key): value for key, value in model.items()}


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_what_its_file_says(preset: str) -> None:
    """On the first model that it is for; its keys are in the files of these models."""
    stated = PRESETS[preset]
    fitting = [name for name in MODELS if any(fnmatch(name, one) for one in stated["sampling"]["models"])]
    model = compose_model(f"model={fitting[0]}", f"sampling={preset}")
    assert model["sampling"].items() >= stated["model"]["sampling"].items()


@pytest.mark.parametrize(
    ("preset", "model"),
    [
        ("emu3_readme", "emu3_gen"), ("heatkv_paper", "infinity_8b"), ("llamagen_readme_3b", "llamagen_3b"),
        ("lumina_readme", "lumina_mgpt_7b_768"), ("qwen3_thinking", "qwen3_8b"),
    ],
)  # fmt: skip
def test_a_preset_of_the_model_s_own_settings_leaves_the_run_what_it_is(preset: str, model: str) -> None:
    own = compose_model(f"model={model}")
    for group, stated in PRESETS[preset]["model"].items():
        assert stated == own[group] or stated.items() <= own[group].items()


def test_keys_of_the_command_go_over_a_preset_and_what_it_leaves_open_is_the_model_s() -> None:
    model = compose_model("model=var_d30", "sampling=var_paper", "model.sampling.cfg=3")
    assert model["sampling"].items() >= {"cfg": 3, "top_k": 600, "top_p": 0.96}.items()


def test_a_baseline_measures_its_model_s_full_cache_under_presets_of_that_model() -> None:
    for path in SWEEPS:
        params, model = read_sweep(path)
        assert (model, params["method"]) == (path.stem, "full")
        for preset in params["sampling"].split(","):
            check_preset({**PRESETS[preset], "model": {"name": model}})
            with pytest.raises(ConfigError, match=rf"^sampling={preset}: is for model=.*, not decoder; "):
                check_preset({**PRESETS[preset], "model": {"name": "decoder"}})


def test_every_model_with_published_numbers_has_a_baseline_that_the_page_names() -> None:
    tables = (find(name) for name in ("reproduction", "reproduction_classes", "reproduction_texts"))
    names = sorted({model_of(label) for table in tables for label in table.models})
    assert names == [path.stem for path in SWEEPS]
    page = (ROOT / "docs" / "reproduction.md").read_text()
    assert sorted(re.findall(r"sweeps=baselines/(\w+) device=cuda", page)) == names
