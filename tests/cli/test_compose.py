"""Composition of a job equals Hydra's, whatever was composed before it, and reads the files of a choice once."""

import re

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from kvbench.cli.config.compose import compose_job, hydra_of_kvbench

JOBS = [
    ["method=heatkv", "budget=0.04"],
    ["method=heatkv", "budget=0.1", "method.sinks=2"],
    ["budget=0.1", "method=heatkv", "method.orders=mine.json"],
    ["model=llamagen_tiny", "method=headkv", "eval=[psnr,ssim]", "eval.ssim.double=true"],
    ["eval=[psnr,ssim]", "eval.ssim={double: false}", "prompts.count=3", "prompts.count=4"],
    ["method=full", "+method.x=1", "++method.y=2", "method.x=3"],
    ["~eval.psnr", "seed=1"],
    [
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        "model=var_tiny",
        "prompts=scene_classes",
        "runs_dir=${oc.env:HOME}/runs",
    ],
    ["work={wait: false}"],
]
"""In this order, so that some find their choices composed, with and without the same values."""


def compose_plainly(overrides: list[str]) -> DictConfig:
    """Compose by Hydra's own loader, which caches nothing."""
    loader = ConfigLoaderImpl(GlobalHydra.instance().config_loader().get_search_path())
    return loader.load_configuration("config", overrides, RunMode.RUN, from_shell=False)


def test_a_job_is_what_hydra_composes() -> None:
    with hydra_of_kvbench():
        for overrides in [*JOBS, *reversed(JOBS)]:
            expected = compose_plainly(overrides)
            cfg, hydra_cfg = compose_job(overrides)
            for part in ("overrides", "runtime", "launcher", "job"):
                assert hydra_cfg[part] == expected.hydra[part]
            del expected._content["hydra"]
            assert cfg == expected
            assert OmegaConf.is_struct(cfg)
            assert list(cfg) == list(expected)


def test_a_value_that_fits_nothing_is_told_as_hydra_does() -> None:
    overrides = ["method=heatkv", "model.sampling.none=2"]
    with hydra_of_kvbench():
        with pytest.raises(HydraException) as expected:
            compose_plainly(overrides)
        with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
            compose_job(overrides)


def test_jobs_of_a_sweep_are_what_hydra_composes() -> None:
    words = ["method=random,heatkv", "budget=0.1,0.2", "hydra.mode=MULTIRUN"]
    with hydra_of_kvbench():
        loader = GlobalHydra.instance().config_loader()
        plain = ConfigLoaderImpl(loader.get_search_path())
        sweeps = [one.load_configuration("config", words, RunMode.MULTIRUN) for one in (loader, plain)]
        assert sweeps[0] == sweeps[1]
        for job in (["method=random", "budget=0.1"], ["method=heatkv", "budget=0.2"], ["method=random"]):
            assert loader.load_sweep_config(sweeps[0], job) == plain.load_sweep_config(sweeps[1], job)


def test_jobs_that_differ_in_values_read_the_files_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with hydra_of_kvbench():
        first, _ = compose_job(["method=snapkv", "budget=0.1"])
        monkeypatch.delattr(ConfigLoaderImpl, "_load_configuration_impl")
        cfg, _ = compose_job(["method=snapkv", "budget=0.2", "seed=3"])
    assert (first.budget, cfg.budget, cfg.seed) == (0.1, 0.2, 3)
