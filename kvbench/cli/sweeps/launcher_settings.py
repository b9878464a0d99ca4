"""Settings of the launchers in `conf/hydra/launcher`, checked before a sweep starts."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf

from kvbench.core.config import ConfigError, Range, check_value

KEY = "hydra.launcher"
Count = Annotated[int, Range(1, 10**6)]
"""A count, minutes or gibibytes."""
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


def check_launcher_settings(name: str, launcher: DictConfig) -> None:
    """Check every key of a preset's launcher.

    Args:
        name: choice of `hydra/launcher`; others than presets have their own checks.
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
