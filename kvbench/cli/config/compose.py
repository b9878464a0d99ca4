"""Composition of a configuration and its settings from command-line words; imports no torch."""

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf, open_dict

from kvbench.cli.config.checks import check_hydra, check_kinds, check_preset
from kvbench.cli.config.command import name_base
from kvbench.cli.config.instantiate import VERSION_BASE
from kvbench.cli.config.loader import compose_words, parse_word, use_presets
from kvbench.cli.config.search_path import list_choices
from kvbench.cli.config.words import check_against, check_overrides
from kvbench.core.config import ConfigError
from kvbench.core.gpus import AUTO, resolve_device, resolve_noise
from kvbench.core.settings import READING_TASKS, Settings
from kvbench.core.suggestions import suggest

if TYPE_CHECKING:  # imports numpy
    from kvbench.runs.record.results import Outcome

SMOKE_PROMPTS = 2
"""Number of prompts of a smoke run."""
SMOKE_METRICS = {"images": ("psnr", "psnr"), "texts": ("exact_answer", "text_length")}
"""File of `conf/eval` and the evaluator in it for smoke runs, by the model's kind of output."""


def hydra_of_kvbench() -> AbstractContextManager[None]:
    """Return a context in which Hydra finds kvbench's files; a null context if Hydra is initialised already."""
    OmegaConf.register_new_resolver("name_model", name_model, replace=True)
    use_presets()
    if GlobalHydra.instance().is_initialized():  # as in the process of a launcher
        return nullcontext()
    context: AbstractContextManager[None] = hydra.initialize_config_module("kvbench.conf", **VERSION_BASE)
    return context


def name_model(path: object, repo: object, otherwise: str) -> str:
    """Return the last part of a model's path or repository, as a folder's name; `otherwise` if both are empty.

    Files of `conf/` call it as `${name_model:<path>,<repository>,<otherwise>}`.

    >>> name_model("weights/SmolLM2-135M", None, "decoder"), name_model(None, "owner/Llama-3.2-1B", "decoder")
    ('SmolLM2-135M', 'Llama-3.2-1B')
    """
    words = re.split(r"[/\\\0\n]+", str(path or repo or "").rstrip("/"))
    return re.sub(r"^\W+|\.(gguf|safetensors)$", "", words[-1])[:100] or otherwise


def compose_job(overrides: list[str]) -> tuple[DictConfig, HydraConf]:
    """Compose the configuration of one job, as `hydra.main` does for its task; also return Hydra's own part.

    Raises:
        HydraException, OmegaConfBaseException: an override matches no key.
        ConfigError: an override removes a required key or names a choice wrongly, a file sets a callback, or `smoke`
            does not fit the prompts.
    """
    words = list(map(name_base, overrides))
    check_overrides(list(map(parse_word, words)))
    cfg = compose_words(words)
    check_hydra(cfg.hydra)
    node = cfg._get_node("hydra")  # moved to `HydraConfig`, which itself would copy it three times as slowly
    assert isinstance(node, DictConfig)
    OmegaConf.set_readonly(node, True)
    holder = OmegaConf.create({}, flags={"no_deepcopy_set_nodes": True})
    holder["hydra"] = node
    with open_dict(cfg):
        del cfg["hydra"]
    node._set_parent(cfg)  # it may refer to the user's keys
    HydraConfig.instance().cfg = holder  # type: ignore[assignment]
    if cfg.get("smoke") is True:  # other values are left to the checks of settings
        shrink(cfg)
    return cfg, HydraConfig.get()


def shrink(cfg: DictConfig) -> None:
    """Reduce a composed configuration to `SMOKE_PROMPTS` prompts and one metric.

    Raises:
        ConfigError: the prompt set has no `count`.
    """
    if "count" not in cfg.prompts:
        raise ConfigError(
            f"smoke=true: {cfg.prompts.get('_target_')} has no prompts.count; leave out smoke=true"
        )
    file, name = SMOKE_METRICS[getattr(get_class(cfg.model._target_), "output", "images")]
    known = OmegaConf.load(str(files("kvbench.conf").joinpath("eval", f"{file}.yaml")))
    assert isinstance(known, DictConfig)
    with open_dict(cfg):
        cfg.prompts.count = SMOKE_PROMPTS
        cfg.eval = {name: known[name]}


def read_settings(cfg: DictConfig) -> Settings:
    """Read and check the settings, and check the groups.

    Raises:
        ConfigError: an unknown key, a value of the wrong type or out of range, an unknown table.
    """
    return check_values(read_values(cfg))


def check_values(values: Mapping[str, object]) -> Settings:
    """Check the values of a configuration, and return the settings; raises the errors of `read_settings`."""
    if values.get("sampling") is not None:
        check_preset(values)
    export = values.get("export")
    is_policy = isinstance(export, Mapping) and bool(export.get("policy"))
    # Tasks that read runs make no objects; checking these imports their classes and torch.
    has_objects = is_policy or values.get("task") not in (*READING_TASKS, "merge")
    settings = Settings.of(values, objects=has_objects)
    if has_objects:
        check_kinds(values)
    if settings.against is not None and settings.task != "report":  # a report checks it against its runs
        with hydra_of_kvbench():
            check_against(settings.against, settings.runs_dir)
    if settings.plan.table is not None:
        from kvbench.report.papers.memory import TABLES  # imports torch

        if settings.plan.table not in TABLES:
            choices = suggest(settings.plan.table, TABLES)
            raise ConfigError(f"plan.table={settings.plan.table}: no such memory column{choices}")
    if settings.published is not None:
        from kvbench.report.papers.published import find

        names = (settings.published,) if isinstance(settings.published, str) else settings.published
        if not names:
            raise ConfigError("published=[]: name one or more tables, or leave it out")
        for name in names:
            find(name)
    return settings


def compose_metrics() -> Mapping[str, Any]:
    """Return every metric of conf/eval, and of added files, by its name; Hydra must be initialised."""
    files = [file for file in list_choices("eval") if file != "none"]
    metrics: Mapping[str, Any] = compose_job([f"eval=[{','.join(files)}]"])[0].eval
    return metrics


def find_finished(values: Mapping[str, object]) -> "Outcome | None":
    """Return the finished run of the same call if nothing that it depends on has changed.

    Args:
        values: result of `read_values` for the job composed last.
    """
    from kvbench.runs.calls import recall  # imports numpy, which `--help` does not need

    runs_dir = Path(str(values.get("runs_dir"))).expanduser()
    return recall(runs_dir, values, name_method())


def name_method() -> str:
    """Return the name in `conf/method` of the method of the job that was composed last."""
    name: str = HydraConfig.get().runtime.choices["method"]
    return name


def list_words() -> tuple[str, ...]:
    """Return the words of the job that was composed last."""
    return tuple(HydraConfig.get().overrides.task)


def read_values(cfg: DictConfig) -> Mapping[str, object]:
    """Resolve every interpolation of a configuration, `device=auto` and `noise=auto`, and return JSON values."""
    if cfg.get("device") == AUTO:
        chosen, cfg.device = cfg.device, resolve_device(AUTO)  # faster than a copy of `cfg`
        try:
            return read_values(cfg)
        finally:
            cfg.device = chosen
    values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    if isinstance(noise := values.get("noise"), str):
        values["noise"] = resolve_noise(noise, str(values.get("device")))
    return values  # type: ignore[return-value]
