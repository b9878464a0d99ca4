"""Composition of a configuration and its settings from command-line words; imports no torch."""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from kvbench.cli.config.check_groups import check_kinds, check_preset, check_protected, check_windows
from kvbench.cli.config.instantiate import VERSION_BASE
from kvbench.cli.config.loader import is_about_group, parse_word, use_caching_loader
from kvbench.cli.config.presets import use_presets
from kvbench.cli.config.resolvers import use_resolvers
from kvbench.cli.config.search_path import list_choices
from kvbench.cli.config.smoke import shrink
from kvbench.core.config import ConfigError
from kvbench.core.files import find_obstacle
from kvbench.core.gpus import resolve_device, resolve_noise
from kvbench.core.settings import GROUPS, READING_TASKS, Settings

if TYPE_CHECKING:  # imports numpy
    from kvbench.runs.record.results import Outcome


def hydra_of_kvbench() -> AbstractContextManager[None]:
    """Return a context in which Hydra knows kvbench's configuration files."""
    use_presets()
    use_resolvers()
    use_caching_loader()
    context: AbstractContextManager[None] = hydra.initialize_config_module("kvbench.conf", **VERSION_BASE)
    return context


def compose_job(overrides: list[str]) -> tuple[DictConfig, HydraConf]:
    """Compose the configuration of one job, as `hydra.main` does for its task; also return Hydra's own part.

    Raises:
        HydraException, OmegaConfBaseException: an override matches no key.
        ConfigError: an override removes a required key, or `smoke` does not fit the prompts.
    """
    _check_overrides(list(map(parse_word, overrides)))
    cfg = hydra.compose("config", overrides=overrides, return_hydra_config=True)
    _take_hydra(cfg)
    shrink(cfg)
    return cfg, HydraConfig.get()


def _take_hydra(cfg: DictConfig) -> None:
    """Move Hydra's part from a configuration to `HydraConfig`, which itself would copy it three times as slowly."""
    node = cfg._get_node("hydra")
    assert isinstance(node, DictConfig)
    OmegaConf.set_readonly(node, True)
    holder = OmegaConf.create({}, flags={"no_deepcopy_set_nodes": True})
    holder["hydra"] = node
    with open_dict(cfg):
        del cfg["hydra"]
    node._set_parent(cfg)  # it may refer to the user's keys
    HydraConfig.instance().cfg = holder  # type: ignore[assignment]


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
        if is_about_group(override) and not override.is_delete() and not _names_choices(override):
            choices = ", ".join(list_choices(key))
            raise ConfigError(f"{override.input_line}: not a choice; choose from {choices}")


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
    return check_values(read_values(cfg))


def check_values(values: Mapping[str, object]) -> Settings:
    """Check the values of a configuration as `read_settings` does, and return the settings."""
    check_protected(values)
    check_windows(values)
    check_preset(values)
    has_objects = _uses_objects(values)
    settings = Settings.of(values, objects=has_objects)
    if has_objects:
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


def _uses_objects(values: Mapping[str, object]) -> bool:
    """Return whether the objects of the groups are checked, which imports their classes and torch.

    Tasks that read runs make none of them, unless a word of the command sets one of their keys.
    """
    export = values.get("export")
    if values.get("task") not in (*READING_TASKS, "merge") or (
        isinstance(export, Mapping) and export.get("policy")
    ):
        return True
    inner = tuple(f"{group}." for group in GROUPS)
    return any(word.lstrip("+~").startswith(inner) for word in HydraConfig.get().overrides.task)


def find_finished(values: Mapping[str, object]) -> "Outcome | None":
    """Return the finished run of the same call if nothing that it depends on has changed.

    Args:
        values: result of `read_values` for the job composed last.
    """
    from kvbench.runs.calls import recall  # imports numpy, which `--help` does not need

    runs_dir = Path(str(values.get("runs_dir"))).expanduser()
    outcome = recall(runs_dir, values, HydraConfig.get().runtime.choices["method"])
    return None if outcome is None or outcome.results is None else outcome


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
    """Resolve every interpolation of a configuration, `device=auto` and `noise=auto`, and return JSON values."""
    if "device" in cfg and (device := resolve_device(cfg.device)) != cfg.device:
        chosen, cfg.device = cfg.device, device  # faster than a copy of `cfg`
        try:
            return read_values(cfg)
        finally:
            cfg.device = chosen
    values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    if isinstance(noise := values.get("noise"), str):
        values["noise"] = resolve_noise(noise, str(values.get("device")))
    return values  # type: ignore[return-value]
