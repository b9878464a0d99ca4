"""Jobs: the objects of a run, made from its composed configuration."""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from kvbench.cli.config.checks import count_processes
from kvbench.cli.config.compose import list_words, name_method, read_values
from kvbench.cli.config.instantiate import instantiate
from kvbench.cli.sweeps.jobs import Recorder, label_sweep
from kvbench.core.config import ConfigError
from kvbench.core.devices import use_device
from kvbench.core.files import hash_values
from kvbench.core.processes import join
from kvbench.core.settings import Settings
from kvbench.kernels.batch_invariance import set_batch_invariant
from kvbench.methods.shared.base import Method
from kvbench.models.base import Model
from kvbench.prompts.base import load_ordered
from kvbench.runs.calibrate import choose_calibration
from kvbench.runs.job import Job, fit_prompts, read_or_write
from kvbench.runs.record.repeat import find_key, select_words

_LOADED: dict[str, Model] = {}
"""The model of this process's latest job of a sweep, by the hash of its configuration."""


def make_job(cfg: DictConfig, settings: Settings, *, keep_model: bool = False) -> Job:
    """Make the objects of one run from its configuration, and join the processes that share its model.

    Args:
        cfg: the composed configuration.
        settings: settings of the run.
        keep_model: use the model of the previous job again if its settings are the same, as jobs of a sweep do.

    Raises:
        ConfigError: the device is missing, or prompts cannot be read.
        ProcessLost: the other processes do not join.
    """
    count = count_processes(cfg)
    if count > 1:
        settings = replace(settings, device=choose_device(settings.device))
    recorder = Recorder.current
    keep = keep_model or recorder is not None
    job = build_job(cfg, settings, name_method(), read_values(cfg), keep_model=keep, processes=count)
    logger = instantiate(cfg.logger) if cfg.logger else None
    sweep = (
        None
        if recorder is None
        else label_sweep(recorder.folder, HydraConfig.get().runtime.choices.get("sweeps"))
    )
    device = f"device={settings.device.partition(':')[0]}"
    words = select_words([*(word for word in list_words() if find_key(word) != "device"), device])
    return replace(job, logger=logger, sweep=sweep, overrides=words)


def build_job(
    parts: Mapping[str, Any],
    settings: Settings,
    method: str,
    config: Mapping[str, object],
    *,
    keep_model: bool,
    processes: int = 1,
) -> Job:
    """Return the objects of a run on the device of its settings.

    Args:
        parts: groups `prompts`, `model`, `method` and `eval` of the configuration.
        settings: its settings.
        method: name in `conf/method`.
        config: the whole configuration, JSON values.
        keep_model: see `make_job`.
        processes: number of processes that share the model.

    Raises:
        ConfigError: the device is missing, or prompts cannot be read.
    """
    use_device(settings.device)
    set_batch_invariant(settings.batch_invariant)
    source, read_at = instantiate(parts["prompts"]), time.time_ns()
    prompts = load_ordered(source, settings.shuffle)
    node = parts["model"]
    model: Model = reuse_model(node, settings.device) if keep_model else instantiate(node)
    if processes > 1:
        model.processes = join(processes, settings.device)
    others = choose_calibration(settings.calibrate, source, prompts)
    prompts, others = fit_prompts(model, prompts), fit_prompts(model, others)
    return Job(
        settings=settings,
        model=read_or_write(model, prompts, others),
        method=make_method(parts["method"], method),
        method_name=method,
        prompts=prompts,
        config=config,
        calibration_prompts=others,
        evaluators={name: instantiate(node) for name, node in (parts.get("eval") or {}).items()},
        read_at=read_at,
    )


def make_method(node: Mapping[str, Any], name: str) -> Method:
    """Return the object of the group `method`, which messages call by its name in `conf/method`."""
    method: Method = instantiate(node)
    method.title = name
    return method


def choose_device(device: str) -> str:
    """Return the device of one of several processes: `cpu`, or the GPU of the process's index on its machine.

    Raises:
        ConfigError: `device` is neither a CPU nor `cuda`, so that all processes would share one GPU.
    """
    if device in ("cpu", "cpu:0"):
        return device
    if device != "cuda":
        raise ConfigError(
            f"device={device}: each process of model.tensor_parallel needs its own GPU; set device=cuda"
        )
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def reuse_model(node: Mapping[str, Any], device: str) -> Model:
    """Return the model of the previous job if its settings and device are the same, else a new one.

    The previous model is freed before another is made.
    """
    key = hash_values(
        [OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node, device]
    )
    if key not in _LOADED:
        _LOADED.clear()
        _LOADED[key] = instantiate(node)
    return _LOADED[key]
