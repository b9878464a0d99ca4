"""Presets of sampling and the sweeps that measure full caches: each fits its models, and others are refused."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from omegaconf import OmegaConf

from kvbench.cli.config.checks import check_preset
from kvbench.cli.config.compose import compose_job, hydra_of_kvbench, read_settings
from kvbench.cli.sweeps.sweeper import split_jobs
from kvbench.core.config import ConfigError
from kvbench.report.papers.published import find, model_of
from tests.support.places import ROOT

CONF = ROOT / "conf"
PRESETS = sorted(path.stem for path in (CONF / "sampling").glob("*.yaml"))
MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
SWEEPS = sorted(path.stem for path in (CONF / "sweeps" / "baselines").glob("*.yaml"))
FITS = {
    "emu3_readme": ["emu3_gen"],
    "headkv_dpg": ["lumina_mgpt_7b_768"],
    "heatkv_paper": ["infinity_2b", "infinity_8b", "infinity_emoji", "infinity_tiny"],
    "infinity_demo": ["infinity_2b", "infinity_tiny"],
    "infinity_infer": ["infinity_2b", "infinity_tiny"],
    "infinity_readme": ["infinity_2b", "infinity_8b", "infinity_emoji", "infinity_tiny"],
    "janus_readme": ["janus_pro_1b", "janus_pro_7b"],
    "llamagen_demo": ["llamagen_3b", "llamagen_b", "llamagen_l", "llamagen_xl", "llamagen_xxl"],
    "llamagen_readme_3b": ["llamagen_3b"],
    "llamagen_readme_b_l": ["llamagen_b", "llamagen_l"],
    "llamagen_readme_xl_xxl": ["llamagen_xl", "llamagen_xxl"],
    "llamagen_t2i_readme": ["llamagen_xl_t2i", "llamagen_xl_t2i_512"],
    "lumina_readme": ["lumina_mgpt_7b_1024", "lumina_mgpt_7b_512", "lumina_mgpt_7b_768"],
    "qwen3_nonthinking": ["qwen3_32b", "qwen3_4b", "qwen3_8b"],
    "qwen3_thinking": ["qwen3_32b", "qwen3_4b", "qwen3_8b"],
    "var_demo": ["var_d16", "var_d20", "var_d24", "var_d30", "var_d36", "var_tiny"],
    "var_paper": ["var_d16", "var_d20", "var_d24", "var_d30", "var_d36", "var_tiny"],
    "var_readme": ["var_d16", "var_d20", "var_d24", "var_d30", "var_d36", "var_tiny"],
}
"""Models that each preset is for."""


@pytest.fixture(autouse=True)
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def compose(*overrides: str) -> Mapping[str, Any]:
    """The configuration of a command, as JSON values."""
    with hydra_of_kvbench():
        values = OmegaConf.to_container(compose_job(list(overrides))[0], resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def read_preset(name: str) -> Mapping[str, Any]:
    """A file of conf/sampling as it stands."""
    values = yaml.safe_load((CONF / "sampling" / f"{name}.yaml").read_text())
    assert isinstance(values, dict)
    return values


def read_params(name: str) -> dict[str, Any]:
    """The words of a baseline's jobs, with those of the file that it takes the rest from."""
    values = yaml.safe_load((CONF / "sweeps" / f"{name}.yaml").read_text())
    [base] = map(read_params, values.get("defaults", [])) if "defaults" in values else [{}]
    published = {"published": values["published"]} if "published" in values else {}
    return {**base, **published, **values["hydra"]["sweeper"]["params"]}


def test_without_a_preset_a_configuration_has_nothing_of_one() -> None:
    assert "sampling" not in compose()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_for_its_models_alone(preset: str) -> None:
    stated = read_preset(preset)
    assert stated["sampling"]["name"] == preset
    for model in MODELS:
        values = {**stated, "model": {"name": model}}
        if model in FITS[preset]:
            check_preset(values)
        else:
            with pytest.raises(ConfigError, match=rf"^sampling={preset}: is for model=.*, not {model}; "):
                check_preset(values)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_what_its_file_says(preset: str) -> None:
    with hydra_of_kvbench():
        config, _ = compose_job([f"model={FITS[preset][0]}", f"sampling={preset}"])
        read_settings(config)
    stated = read_preset(preset)["model"]["sampling"]
    assert OmegaConf.to_container(config.model.sampling).items() >= stated.items()


@pytest.mark.parametrize(
    ("preset", "model"),
    [
        ("emu3_readme", "emu3_gen"), ("heatkv_paper", "infinity_8b"), ("llamagen_readme_3b", "llamagen_3b"),
        ("lumina_readme", "lumina_mgpt_7b_768"), ("qwen3_thinking", "qwen3_8b"),
    ],
)  # fmt: skip
def test_a_preset_of_the_model_s_own_settings_leaves_the_run_what_it_is(preset: str, model: str) -> None:
    own = compose(f"model={model}")["model"]
    for group, stated in read_preset(preset)["model"].items():
        assert stated == own[group] or stated.items() <= own[group].items()


def test_keys_of_the_command_go_over_a_preset_and_what_it_leaves_open_is_the_model_s() -> None:
    model = compose("model=var_d30", "sampling=var_paper", "model.sampling.cfg=3")["model"]
    assert model["sampling"].items() >= {"cfg": 3, "top_k": 600, "top_p": 0.96}.items()


def test_every_preset_names_its_source() -> None:
    for preset in PRESETS:
        text = (CONF / "sampling" / f"{preset}.yaml").read_text()
        [source] = re.findall(r"^# Sources?: (.*?)^sampling:", text, re.MULTILINE | re.DOTALL)
        assert re.search(r"arXiv:\d{4}\.\d{5}|of \w[\w-]+/\w|model card of Qwen", source), preset


@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_baseline_measures_its_model_s_full_cache_under_presets_of_that_model(sweep: str) -> None:
    params = read_params(f"baselines/{sweep}")
    assert (params["model"], params["method"]) == (sweep, "full")
    presets = params["sampling"].split(",")
    assert all(sweep in FITS[preset] for preset in presets)
    assert sweep in {model_of(label) for label in find(params["published"]).models}


@pytest.mark.slow
@pytest.mark.parametrize("sweep", SWEEPS)
def test_jobs_of_a_baseline_compose_to_runs_of_the_published_table(sweep: str) -> None:
    with hydra_of_kvbench():
        cfg = hydra.compose("config", overrides=[f"sweeps=baselines/{sweep}"], return_hydra_config=True)
        params = {name: str(value) for name, value in read_params(f"baselines/{sweep}").items()}
        assert {"published": cfg.published, **cfg.hydra.sweeper.params} == params  # which are text there
        listed = {target for where in find(cfg.published).rows for target in where["prompts._target_"]}
        jobs = split_jobs(cfg.hydra.sweeper.params, [f"sweeps=baselines/{sweep}"])
        for job in {jobs[0], jobs[-1]}:
            config, _ = compose_job(list(job))
            read_settings(config)
            assert (config.model.name, config.budget) == (sweep, 1.0)
            assert config.method._target_ == "kvbench.methods.full.Full"
            assert config.prompts._target_ in listed


def test_every_model_with_published_numbers_has_a_baseline_that_the_page_names() -> None:
    tables = (find(name) for name in ("reproduction", "reproduction_classes", "reproduction_texts"))
    assert sorted({model_of(label) for table in tables for label in table.models}) == SWEEPS
    page = (ROOT / "docs" / "reproduction.md").read_text()
    assert sorted(re.findall(r"sweeps=baselines/(\w+) device=cuda", page)) == SWEEPS
