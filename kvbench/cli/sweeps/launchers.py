"""Launchers of sweeps: checks of the presets in `conf/hydra/launcher`."""

import shutil
import socket
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf

from kvbench.cli.config.loader import EXTRAS
from kvbench.cli.sweeps.sweeper import list_jobs
from kvbench.core.config import ConfigError, Range, check_value
from kvbench.core.gpus import resolve_device

CONNECT_TIMEOUT = 10.0
"""Seconds within which a Ray cluster must accept a connection."""

SLURM = "submitit_slurm"
LOCAL = ("basic", "joblib")
"""Launchers whose jobs run on this machine."""
KEY = "hydra.launcher"
Count = Annotated[int, Range(1, 10**6)]
"""A positive whole number: a count, minutes or gibibytes."""
Whole = Annotated[int, Range(0, 10**6)]
Share = Annotated[float, Range(0)]
Group = Mapping[str, Any]

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "joblib": {  # arguments of joblib.Parallel; -1 jobs are as many as cores
        "n_jobs": Count | Literal[-1],
        "batch_size": Count | Literal["auto"],
        "verbose": Whole,
        "timeout": Annotated[float, Range(0, above=True)] | None,
        "backend": Literal["loky", "multiprocessing"] | None,
        "pre_dispatch": int | str,
        "temp_folder": str | None,
    },
    "submitit_slurm": {  # options of sbatch and of submitit
        **dict.fromkeys(
            ("partition", "qos", "account", "constraint", "exclude", "comment", "gres"), str | None
        ),
        **dict.fromkeys(("mem_per_gpu", "mem_per_cpu"), str | None),
        "stderr_to_stdout": bool,
        **dict.fromkeys(("nodes", "tasks_per_node", "array_parallelism"), Count),
        **dict.fromkeys(("timeout_min", "cpus_per_task", "cpus_per_gpu"), Count | None),
        **dict.fromkeys(("max_num_timeout", "signal_delay_s"), Whole),
        **dict.fromkeys(("gpus_per_node", "gpus_per_task"), Count | str | None),
        "mem_gb": Annotated[float, Range(0, above=True)] | None,
        **dict.fromkeys(("setup", "srun_args"), list[str] | None),
        "additional_parameters": Group,
        **dict.fromkeys(("submitit_folder", "name"), str),
    },
    "ray": {  # arguments of ray.init and ray.remote
        **dict.fromkeys(("ray", "ray.init", "ray.remote"), Group),
        "ray.init.address": str | None,
        **dict.fromkeys(("ray.init.num_cpus", "ray.init.num_gpus"), Annotated[int, Range(0)] | None),
        "ray.init.object_store_memory": Annotated[int, Range(1)] | None,
        **dict.fromkeys(("ray.remote.num_cpus", "ray.remote.num_gpus"), Share | None),
        "ray.remote.max_retries": Annotated[int, Range(-1)] | None,
    },
}
"""Types of settings of each preset, outer groups first."""


def check_launcher(config: DictConfig) -> None:
    """Check that a sweep's launcher can start jobs on this machine.

    Raises:
        ConfigError: the launcher is not installed, one of its settings is wrong, the cluster cannot be reached, a GPU
            is missing, or a Slurm job does not fit its node.
    """
    name, target = config.hydra.runtime.choices["hydra/launcher"], config.hydra.launcher._target_
    if name in EXTRAS and target not in Plugins.instance().class_name_to_class:
        raise ConfigError(f"hydra/launcher={name}: not installed; pip install 'kvbench[{EXTRAS[name]}]'")
    check_launcher_settings(name, config.hydra.launcher)
    if name == SLURM:
        if shutil.which("srun") is None:
            raise ConfigError(
                f"hydra/launcher={name}: srun is not installed; start the sweep on a machine of the cluster"
            )
        _check_tasks(config)
    if name == "ray":
        _check_address(str(config.hydra.launcher.ray.init.address))
    if name in LOCAL and (device := resolve_device(str(config.get("device")))).startswith("cuda"):
        from kvbench.core.devices import check_device  # imports torch

        check_device(device)
        if name == "joblib":
            _check_gpus(config, device)


def check_launcher_settings(name: str, launcher: DictConfig) -> None:
    """Check every key of a preset's launcher.

    Args:
        name: choice of `hydra/launcher`; only presets are checked here.
        launcher: `hydra.launcher`.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or is out of range.
    """
    types = SETTINGS.get(name, {})
    values: Any = OmegaConf.to_container(launcher, resolve=True, throw_on_missing=True)
    for key, hint in types.items():
        *groups, inner = key.split(".")
        node = values
        for group in groups:
            node = node[group]
        if inner in node or hint is Group:
            check_value(node.get(inner), hint, f"{KEY}.{key}")
            if node.get(inner) == "":
                raise ConfigError(f"{KEY}.{key} is empty; leave it out")
    if unknown := [key for key in values if types and key not in ("_target_", *types)]:
        raise ConfigError(f"{KEY}.{unknown[0]}: no such key; there are {', '.join(types)}")


def count_tasks(launcher: DictConfig) -> int:
    """Return the number of processes in one Slurm job of a launcher."""
    return int(launcher.nodes * launcher.tasks_per_node)


def _check_tasks(config: DictConfig) -> None:
    """Check that each process of a Slurm job can be a worker with its own GPU.

    Raises:
        ConfigError: a job would run in several processes, a node has fewer GPUs than processes, or the number of
            workers is not a multiple of a job's processes.
    """
    launcher, tasks = config.hydra.launcher, count_tasks(config.hydra.launcher)
    key = f"hydra.launcher.tasks_per_node={launcher.tasks_per_node}"
    if tasks > 1 and config.get("task") != "work" and config.work.wait:
        raise ConfigError(f"{key}: only for workers; set task=work or work.wait=false, or leave it out")
    gpus = launcher.get("gpus_per_node")
    if gpus and launcher.tasks_per_node > gpus:
        raise ConfigError(
            f"{key}: more workers than GPUs of a node (hydra.launcher.gpus_per_node={gpus}); set "
            f"hydra.launcher.tasks_per_node={gpus}"
        )
    if config.get("task") == "work" and config.work.workers % tasks:
        up = -(-config.work.workers // tasks) * tasks
        raise ConfigError(
            f"work.workers={config.work.workers}: not a multiple of the {tasks} workers of a job ({key}, "
            f"hydra.launcher.nodes={launcher.nodes}); set work.workers={up}"
        )


def _check_gpus(config: DictConfig, device: str) -> None:
    """Raise ConfigError if more jobs run at a time than there are GPUs."""
    import joblib
    import torch

    jobs = config.work.workers if config.get("task") == "work" else len(list_jobs(config))
    parallel = min(jobs, joblib.effective_n_jobs(config.hydra.launcher.n_jobs))
    gpus = 1 if ":" in device else torch.cuda.device_count()
    if parallel > gpus:
        raise ConfigError(
            f"hydra.launcher.n_jobs={config.hydra.launcher.n_jobs}: {parallel} jobs at a time, but device="
            f"{device} is {gpus} GPU{'s' if gpus > 1 else ''} here; set hydra.launcher.n_jobs={gpus}"
        )


def _check_address(address: str) -> None:
    """Connect to the Ray cluster at `host:port`; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"hydra.launcher.ray.init.address={address}: no Ray cluster at this address ({error}); start it, or leave "
            "the address out to use this machine"
        ) from None
