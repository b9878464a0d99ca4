"""Composition of a job equals Hydra's, with prompts, metrics and windows that a model's file names."""

import re

import pytest
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from kvbench.cli.config.compose import compose_job, hydra_of_kvbench
from kvbench.cli.config.loader import CREATE_MAP

JOBS = [
    ["method=heatkv", "budget=0.04", "eval=scenes"],  # without it, the model's own
    ["method=heatkv", "budget=0.1", "method.sinks=2", "eval=scenes"],
    ["model=llamagen_tiny", "method=headkv", "eval=[psnr,ssim]", "eval.ssim.double=true"],
    ["eval=[psnr,ssim]", "eval.ssim={double: false}", "prompts.count=3", "prompts.count=4"],
    ["method=full", "+method.x=1", "++method.y=2", "method.x=3", "work={wait: false}", "eval=scenes"],
    ["eval=scenes", "~eval.psnr", "seed=1", "runs_dir=${oc.env:HOME}/runs"],
    [
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        "model=var_tiny",
        "prompts=scene_classes",
        "eval=all",
    ],
]
"""In this order, so that some find their choices composed, with and without the same values."""


def compose_plainly(overrides: list[str]) -> DictConfig:
    """Compose by Hydra's own loader, which caches nothing, and its own map of choices."""
    loader = ConfigLoaderImpl(GlobalHydra.instance().config_loader().get_search_path())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defaults_list, CREATE_MAP, getattr(defaults_list, CREATE_MAP).args[0])
        return loader.load_configuration("config", overrides, RunMode.RUN, from_shell=False)


def test_a_job_is_what_hydra_composes() -> None:
    with hydra_of_kvbench():
        plain = [compose_plainly(overrides) for overrides in JOBS]
        own = [expected._content.pop("hydra") for expected in plain]
        for number in [*range(len(JOBS)), *reversed(range(len(JOBS)))]:
            expected = plain[number]
            cfg, hydra_cfg = compose_job(JOBS[number])
            for part in ("overrides", "runtime", "launcher", "job"):
                assert hydra_cfg[part] == own[number][part]
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


def test_a_launcher_that_is_imported_again_leaves_its_preset() -> None:
    """Hydra would check the preset's file against the schema that the launcher's package stores."""
    with hydra_of_kvbench():
        before = compose_job(["hydra/launcher=joblib"])[1].launcher
        ConfigStore.instance().store(
            group="hydra/launcher", name="joblib", node={"other": 1}, provider="again"
        )
        after = (
            GlobalHydra.instance()
            .config_loader()
            .load_configuration("config", ["hydra/launcher=joblib"], RunMode.RUN)
        )
    assert after.hydra.launcher == before


def test_jobs_that_differ_in_values_read_the_files_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with hydra_of_kvbench():
        first, _ = compose_job(["method=snapkv", "budget=0.1"])
        monkeypatch.delattr(ConfigLoaderImpl, "_load_configuration_impl")
        cfg, _ = compose_job(["method=snapkv", "budget=0.2", "seed=3"])
    assert (first.budget, cfg.budget, cfg.seed) == (0.1, 0.2, 3)


def choices(*words: str) -> tuple[str, list[str]]:
    """The class of the prompts, and the names of the metrics' entries."""
    with hydra_of_kvbench():
        cfg, _ = compose_job(list(words))
        return cfg.prompts._target_.rsplit(".", 1)[1], sorted(cfg.eval or {})


ANSWERS = ["exact_answer", "exact_answer_change", "text_length"]
DIFFERING = ["fid_scenes", "geneval", "lpips_scenes", "psnr", "ssim"]
"""Default metrics of the embedded image models."""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("model=llamagen_tiny", ("Scenes", DIFFERING)),
        ("model=reasoner_tiny", ("MathTiny", ANSWERS)),
        ("model=var_tiny", ("SceneClasses", DIFFERING)),
        ("model=infinity_2b", ("Scenes", "scenes")),
        ("model=reasoner_tiny eval=none", ("MathTiny", [])),
        ("model=smollm2_135m prompts=file prompts.path=my.txt", ("PromptFile", "agreement")),
        ("model=reasoner_tiny prompts=file prompts.path=my.txt eval=forced", ("PromptFile", "forced")),
        ("sweeps=hackpp_table2 model=reasoner_tiny", ("SceneClasses", "paired")),
        ("model=infinity_tiny +model.default_prompts=scene_classes", ("SceneClasses", DIFFERING)),
    ],
)
def test_what_is_named_last_decides(words: str, expected: tuple[str, str | list[str]]) -> None:
    prompts, metrics = expected  # names of metrics, or a file of conf/eval
    names = choices(f"eval={metrics}")[1] if isinstance(metrics, str) else metrics
    assert choices(*words.split()) == (prompts, names)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("model=reasoner_tiny method=snapkv", (16, "grid", 5)),  # of its published tables
        ("model=reasoner_tiny method=snapkv windows=text", (8, "last", 7)),
        ("model=smollm2_135m method=snapkv", (8, "last", 7)),
        ("model=smollm2_135m method=adakv windows=image", (16, "grid", 5)),
    ],
)
def test_windows_are_those_of_texts_where_the_model_says_so(
    words: str, expected: tuple[int, str, int]
) -> None:
    with hydra_of_kvbench():
        method = compose_job(words.split())[0].method
        assert (method.window, method.queries, method.kernel) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("method=pricekv", "Forecast"),
        ("method=pricekv model=reasoner_tiny", "H2O"),
        ("method=pricekv model=reasoner_tiny method@method.base=snapkv", "SnapKV"),
        ("method=pricekv +model.default_base=snapkv", "SnapKV"),
    ],
)
def test_the_scores_of_pricekv_are_a_forecast_but_for_texts(words: str, expected: str) -> None:
    with hydra_of_kvbench():
        assert compose_job(words.split())[0].method.base._target_.endswith(f".{expected}")


def test_the_words_of_the_command_stay_what_was_typed() -> None:
    with hydra_of_kvbench():
        compose_job(["model=reasoner_tiny", "budget=128"])
        own = HydraConfig.get()
        assert list(own.overrides.task) == ["model=reasoner_tiny", "budget=128"]
        assert own.runtime.choices["prompts"] == "math_tiny"
