"""Composition of a configuration and its settings from command-line words; imports no torch."""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from kvbench.cli.config.check_groups import check_kinds, check_preset, check_protected
from kvbench.cli.config.instantiate import VERSION_BASE
from kvbench.cli.config.presets import use_presets
from kvbench.cli.config.search_path import list_choices
from kvbench.core.config import ConfigError
from kvbench.core.files import find_obstacle
from kvbench.core.gpus import resolve_device
from kvbench.core.settings import CHOICE_KEYS, GROUPS, READING_TASKS, Settings

if TYPE_CHECKING:  # imports numpy
    from kvbench.runs.record.results import Outcome


def hydra_of_kvbench() -> AbstractContextManager[None]:
    """Return a context in which Hydra knows kvbench's configuration files."""
    use_presets()
    context: AbstractContextManager[None] = hydra.initialize_config_module("kvbench.conf", **VERSION_BASE)
    return context


def compose_job(overrides: list[str]) -> tuple[DictConfig, HydraConf]:
    """Compose the configuration of one job, as `hydra.main` does for its task; also return Hydra's own part.

    Raises:
        HydraException, OmegaConfBaseException: an override matches no key.
        ConfigError: an override removes a required key.
    """
    parsed = OverridesParser.create().parse_overrides(overrides)
    _check_overrides(parsed)
    cfg = _compose(parsed)
    HydraConfig.instance().set_config(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg, HydraConfig.get()


def _compose(overrides: Sequence[Override]) -> DictConfig:
    """Compose as `hydra.compose` does, with Hydra's own part.

    Reading and merging the files takes a third of a second; the result is cached by choices of groups, and other
    values are set on a copy. `hydra.job.override_dirname` names only the choices.
    """
    values = [override for override in overrides if _sets_value(override)]
    choices = [str(override.input_line) for override in overrides if not _sets_value(override)]
    search_path = str(GlobalHydra.instance().config_loader().get_search_path())
    try:
        cfg = deepcopy(_compose_choices(tuple(choices), search_path))
        for override in values:
            OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
    except OmegaConfBaseException:  # raised again with Hydra's message
        words = [str(override.input_line) for override in overrides]
        return hydra.compose("config", overrides=words, return_hydra_config=True)
    cfg.hydra.runtime.cwd = str(Path.cwd())
    cfg.hydra.overrides.task = [
        override.input_line for override in overrides if not override.is_hydra_override()
    ]
    return cfg


@lru_cache(maxsize=64)  # a third of a megabyte each
def _compose_choices(choices: tuple[str, ...], _search_path: str) -> DictConfig:
    """Compose a configuration; the search path is only a key of the cache."""
    return hydra.compose("config", overrides=list(choices), return_hydra_config=True)


def _sets_value(override: Override) -> bool:
    """Return whether an override only changes the value of a key outside Hydra's part."""
    if override.is_hydra_override() or override.is_sweep_override() or _is_about_group(override):
        return False
    return override.type is OverrideType.CHANGE and override.package is None


def _check_overrides(overrides: Sequence[Override]) -> None:
    """Check that overrides remove no key and name choices for groups; Hydra must be initialised."""
    for override in overrides:
        key, _, inner = override.key_or_group.partition(".")
        if override.is_delete() and key != "hydra" and not (inner and key in GROUPS):
            remedy = (
                f"set {key}=none" if key in ("eval", "logger") else "keep the default of conf/config.yaml"
            )
            raise ConfigError(f"{override.key_or_group}: missing; set it, or {remedy}")
        if override.key_or_group == "hydra.launcher.n_jobs" and override.value() == 0:
            raise ConfigError("hydra.launcher.n_jobs=0: must be at least 1, or -1 for the number of cores")
        if _is_about_group(override) and not override.is_delete() and not _names_choices(override):
            choices = ", ".join(list_choices(key))
            raise ConfigError(f"{override.input_line}: not a choice; choose from {choices}")


def _is_about_group(override: Override) -> bool:
    key, _, inner = override.key_or_group.partition(".")
    return not inner and (key in CHOICE_KEYS or key.partition("/")[0] == "hydra")


def _names_choices(override: Override) -> bool:
    if override.is_sweep_override():
        return True
    value, takes_list = override.value(), override.key_or_group in ("eval", "sweeps")
    if isinstance(value, list) and takes_list:
        return all(isinstance(name, str) for name in value)
    return isinstance(value, str)


def read_settings(cfg: DictConfig) -> Settings:
    """Read and check the settings, and check the groups.

    Raises:
        ConfigError: an unknown key, a value of the wrong type or out of range, an unknown table.
    """
    values = read_values(cfg)
    check_protected(values)
    check_preset(values)
    settings = Settings.of(values)
    check_kinds(values)
    if settings.plan.table is not None:
        from kvbench.report.papers.memory import TABLES  # imports torch

        if settings.plan.table not in TABLES:
            choices = ", ".join(TABLES)
            raise ConfigError(
                f"plan.table={settings.plan.table}: no such memory column; choose from {choices}"
            )
    if settings.published is not None:
        from kvbench.report.papers.published import find

        find(settings.published)
    return settings


def find_finished(cfg: DictConfig) -> "Outcome | None":
    """Return the finished run of the same call if nothing that it depends on has changed."""
    from kvbench.runs.calls import recall  # imports numpy, which `--help` does not need

    values, method = read_values(cfg), HydraConfig.get().runtime.choices["method"]
    return recall(Path(str(values.get("runs_dir"))).expanduser(), values, method)


def count_processes(cfg: DictConfig) -> int:
    """Return the number of processes that share the model (`model.tensor_parallel`), all of them started.

    Raises:
        ConfigError: another number of processes was started, or the task is for one process.
    """
    node = OmegaConf.select(cfg, "model.tensor_parallel", default=1)
    count = node if type(node) is int and node > 0 else 1  # other values are refused later, with their type
    started = int(os.environ.get("WORLD_SIZE", "1"))
    key = f"model.tensor_parallel={count}"
    for name in ("heads", "kv_heads", "hidden"):
        size = OmegaConf.select(cfg, f"model.transformer.{name}", default=0)
        if type(size) is int and size % count:
            raise ConfigError(f"{key}: must divide model.transformer.{name}={size}")
    if count != started:
        start = (
            f"torchrun --nproc-per-node {count} run.py ... {key}" if count > 1 else f"python run.py ... {key}"
        )
        raise ConfigError(f"{key}: started as {started} process{'es' * (started > 1)}; start it as `{start}`")
    if count > 1 and cfg.task != "run":
        raise ConfigError(f"{key}: task={cfg.task} is for one process; set model.tensor_parallel=1")
    if count > 1 and HydraConfig.get().mode is RunMode.MULTIRUN:
        raise ConfigError(f"{key}: start each run of a sweep separately, without -m")
    return count


def check_runs_dir(settings: Settings) -> None:
    """Check that the output folder is writable, without creating it.

    Raises:
        ConfigError: it is not.
    """
    if settings.task not in ("plan", "check") and (problem := find_obstacle(settings.writes)) is not None:
        key, hint = "runs_dir", "; output=... names another folder" * (settings.task in READING_TASKS)
        if settings.writes != settings.runs_dir:
            key, hint = "output", ""
        raise ConfigError(f"{key}={settings.writes}: cannot be written ({problem}){hint}")


def read_values(cfg: DictConfig) -> Mapping[str, object]:
    """Resolve every interpolation of a configuration and `device=auto`, and return JSON values."""
    if "device" in cfg and (device := resolve_device(cfg.device)) != cfg.device:
        chosen, cfg.device = cfg.device, device  # faster than a copy of `cfg`
        try:
            return read_values(cfg)
        finally:
            cfg.device = chosen
    values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return values  # type: ignore[return-value]
