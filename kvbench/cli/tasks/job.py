"""Jobs: the objects of a run, made from its composed configuration."""

import os
import time
from dataclasses import replace
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from kvbench.cli.config.checks import count_processes
from kvbench.cli.config.compose import read_values
from kvbench.cli.config.instantiate import instantiate
from kvbench.cli.sweeps.jobs import Recorder, label_sweep
from kvbench.core.config import ConfigError
from kvbench.core.devices import use_device
from kvbench.core.files import hash_values
from kvbench.core.processes import join
from kvbench.core.settings import Settings
from kvbench.kernels.batch_invariance import set_batch_invariant
from kvbench.models.base import Model
from kvbench.prompts.base import load_ordered
from kvbench.runs.calibrate import choose_calibration
from kvbench.runs.job import Job, read_or_write

_LOADED: dict[str, Model] = {}
"""The model of this process's latest job of a sweep, by the hash of its configuration."""


def make_job(cfg: DictConfig, settings: Settings, *, keep_model: bool = False) -> Job:
    """Make the objects of one run from its configuration, and join the processes that share its model.

    Args:
        cfg: the composed configuration.
        settings: its settings.
        keep_model: use the model of the previous job again if its settings are the same, as jobs of a sweep do.

    Raises:
        ConfigError: the device is missing, or prompts cannot be read.
        ProcessLost: the other processes do not start.
    """
    count = count_processes(cfg)
    if count > 1:
        settings = replace(settings, device=choose_device(settings.device))
    use_device(settings.device)
    set_batch_invariant(settings.batch_invariant)
    source = instantiate(cfg.prompts)
    recorder, choices = Recorder.current, HydraConfig.get().runtime.choices
    read_at, prompts = time.time_ns(), load_ordered(source, settings.shuffle)
    keep_model = keep_model or recorder is not None
    model: Any = reuse_model(cfg.model, settings.device) if keep_model else instantiate(cfg.model)
    if count > 1:
        model.processes = join(count, settings.device)
    others = choose_calibration(settings.calibrate, source, prompts)
    return Job(
        settings=settings,
        model=read_or_write(model, prompts, others),
        method=instantiate(cfg.method),
        method_name=choices["method"],
        prompts=prompts,
        config=read_values(cfg),
        calibration_prompts=others,
        evaluators={name: instantiate(node) for name, node in (cfg.get("eval") or {}).items()},
        logger=instantiate(cfg.logger) if cfg.logger else None,
        sweep=None if recorder is None else label_sweep(recorder.folder, choices.get("sweeps")),
        read_at=read_at,
    )


def choose_device(device: str) -> str:
    """Return the device of one of several processes: the GPU with the process's number on its machine.

    Raises:
        ConfigError: one GPU is named for all.
    """
    if device in ("cpu", "cpu:0"):
        return device
    if device != "cuda":
        raise ConfigError(
            f"device={device}: each process of model.tensor_parallel has a GPU; set device=cuda"
        )
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def reuse_model(node: DictConfig, device: str) -> Model:
    """Return the model of the previous job if its settings and device are the same, else a new one.

    The previous model is freed before another is made.
    """
    key = hash_values([OmegaConf.to_container(node, resolve=True), device])
    if key not in _LOADED:
        _LOADED.clear()
        _LOADED[key] = instantiate(node)
    return _LOADED[key]
