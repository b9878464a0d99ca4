"""Composition of a configuration and its settings from command-line words; imports no torch."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from kvbench.cli.config.check_groups import check_kinds, check_preset, check_protected, check_windows
from kvbench.cli.config.instantiate import VERSION_BASE
from kvbench.cli.config.loader import parse_word, use_caching_loader
from kvbench.cli.config.overrides import check_against, check_overrides
from kvbench.cli.config.presets import use_presets
from kvbench.cli.config.resolvers import use_resolvers
from kvbench.cli.config.smoke import shrink
from kvbench.core.config import ConfigError, import_target, read_count, show
from kvbench.core.files import find_obstacle
from kvbench.core.gpus import AUTO, resolve_device, resolve_noise
from kvbench.core.settings import READING_TASKS, Settings

if TYPE_CHECKING:  # imports numpy
    from kvbench.runs.record.results import Outcome


def hydra_of_kvbench() -> AbstractContextManager[None]:
    """Return a context in which Hydra knows kvbench's configuration files; an open one is used again."""
    if GlobalHydra.instance().is_initialized():
        return nullcontext()
    use_presets()
    use_resolvers()
    use_caching_loader()
    context: AbstractContextManager[None] = hydra.initialize_config_module("kvbench.conf", **VERSION_BASE)
    return context


def compose_job(overrides: list[str]) -> tuple[DictConfig, HydraConf]:
    """Compose the configuration of one job, as `hydra.main` does for its task; also return Hydra's own part.

    Raises:
        HydraException, OmegaConfBaseException: an override matches no key.
        ConfigError: an override removes a required key or names a choice wrongly, a file sets a callback, or `smoke`
            does not fit the prompts.
    """
    check_overrides(list(map(parse_word, overrides)))
    cfg = hydra.compose("config", overrides=overrides, return_hydra_config=True)
    _check_hydra(cfg.hydra)
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


def _check_hydra(node: DictConfig) -> None:
    """Check keys of Hydra's part that files, too, may set.

    Hydra would make callbacks of any class or function.

    Raises:
        ConfigError: naming the key.
    """
    if set(node.callbacks) != {"summary"} or not _is_callback(node.callbacks.summary):
        raise ConfigError(
            f"hydra.callbacks={show(OmegaConf.to_container(node.callbacks))}: must stay as in conf/config.yaml; write "
            "a logger (docs/extending.md) instead"
        )
    if not isinstance(node.verbose, bool | str | ListConfig):
        raise ConfigError(
            f"hydra.verbose={show(node.verbose)}: must be true, false or a list of names of loggers"
        )
    if not isinstance(node.launcher, DictConfig) or node.launcher.get("_target_") is None:
        raise ConfigError("hydra.launcher: must be a group of keys; choose with hydra/launcher=")


def _is_callback(node: DictConfig | None) -> bool:
    """Return whether a node makes a callback of kvbench."""
    path = None if node is None else node.get("_target_")
    if not (isinstance(path, str) and path.startswith("kvbench.")):
        return False
    kind = import_target(path, "hydra.callbacks.summary")
    return isinstance(kind, type) and issubclass(kind, Callback)


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
    if settings.against is not None and settings.task != "report":  # which looks for it among its runs
        with hydra_of_kvbench():
            check_against(settings.against, settings.runs_dir)
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

    Tasks that read runs make none of them.
    """
    export = values.get("export")
    is_policy = isinstance(export, Mapping) and bool(export.get("policy"))
    return is_policy or values.get("task") not in (*READING_TASKS, "merge")


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
    started, _, _ = read_count("WORLD_SIZE", 1), read_count("RANK", 0), read_count("LOCAL_RANK", 0)
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


def check_runs_dir(settings: Settings, *, alone: bool = False) -> None:
    """Check that the output folder is writable, without creating it.

    A run `alone`, outside a sweep, may be finished in a folder that is not: `kvbench.runs.execute.run` decides.

    Raises:
        ConfigError: it is not.
    """
    if alone and settings.task == "run" and settings.runs_dir.is_dir():
        return
    if settings.task not in ("plan", "check") and (problem := find_obstacle(settings.writes)) is not None:
        key, hint = "runs_dir", "; output=... names another folder" * (settings.task in READING_TASKS)
        if settings.writes != settings.runs_dir:
            key, hint = "output", ""
        raise ConfigError(f"{key}={settings.writes}: cannot be written ({problem}){hint}")


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
