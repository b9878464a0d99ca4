"""Settings of the launchers in `conf/hydra/launcher`, checked before a sweep starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf

from kvbench.core.config import ConfigError, Range, check_part, check_value, show

KEY = "hydra.launcher"
MAX_COUNT = 10**6
Count = Annotated[int, Range(1, MAX_COUNT)]
"""A count, minutes or gibibytes."""
Whole = Annotated[int, Range(0, MAX_COUNT)]
Share = Annotated[float, Range(0)]


@dataclass(frozen=True)
class JoblibSettings:
    """Settings of `hydra/launcher=joblib`, arguments of `joblib.Parallel`; -1 jobs are as many as cores."""

    n_jobs: Count | Literal[-1] = -1
    batch_size: Count | Literal["auto"] = 1
    verbose: Whole = 0
    backend: Literal["loky", "multiprocessing"] | None = None
    timeout: Annotated[float, Range(0, above=True)] | None = None
    pre_dispatch: int | str = "2*n_jobs"
    temp_folder: str | None = None


@dataclass(frozen=True)
class SlurmSettings:
    """Settings of `hydra/launcher=submitit_slurm`, options of sbatch and of submitit."""

    submitit_folder: str
    name: str = "kvbench"
    partition: str | None = None
    qos: str | None = None
    account: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    comment: str | None = None
    gres: str | None = None
    timeout_min: Count | None = None
    max_num_timeout: Whole = 10
    signal_delay_s: Whole = 120
    array_parallelism: Count = 256
    cpus_per_task: Count | None = None
    cpus_per_gpu: int | None = None
    gpus_per_node: Annotated[int, Range(1)] | str | None = None
    gpus_per_task: Annotated[int, Range(1)] | str | None = None
    mem_gb: Annotated[float, Range(0, above=True)] | None = None
    mem_per_gpu: str | None = None
    mem_per_cpu: str | None = None
    nodes: Count = 1
    tasks_per_node: Count = 1
    stderr_to_stdout: bool = False
    setup: tuple[str, ...] | None = None
    srun_args: tuple[str, ...] | None = None
    additional_parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.submitit_folder or not self.name:
            empty = "name" if self.submitit_folder else "submitit_folder"
            raise ConfigError(f"{KEY}.{empty} is empty; leave it out")


RAY: Mapping[str, Any] = {
    "init.address": str | None,
    "init.num_cpus": Annotated[int, Range(0)] | None,
    "init.num_gpus": Annotated[int, Range(0)] | None,
    "init.object_store_memory": Annotated[int, Range(1)] | None,
    "remote.num_cpus": Share | None,
    "remote.num_gpus": Share | None,
    "remote.max_retries": Annotated[int, Range(-1)] | None,
}
"""Types of the arguments of `ray.init` and `ray.remote` that are checked here; Ray has more."""


@dataclass(frozen=True)
class RaySettings:
    """Settings of `hydra/launcher=ray`: arguments of `ray.init` and `ray.remote`."""

    ray: Mapping[str, Any]

    def __post_init__(self) -> None:
        for key, hint in RAY.items():
            part, _, name = key.partition(".")
            if not isinstance(values := self.ray.get(part), Mapping):
                raise ConfigError(f"{KEY}.ray.{part}={show(values)}: must be a group of keys")
            check_value(values.get(name), hint, f"{KEY}.ray.{key}")
        if self.ray["init"].get("address") == "":
            raise ConfigError(f"{KEY}.ray.init.address is empty; set local, auto or host:port")


SETTINGS: Mapping[str, type] = {
    "joblib": JoblibSettings,
    "submitit_slurm": SlurmSettings,
    "ray": RaySettings,
}
"""Settings of each preset."""


def check_launcher_settings(name: str, launcher: DictConfig) -> None:
    """Check every key of a preset's launcher.

    Args:
        name: choice of `hydra/launcher`; others than presets have their own checks.
        launcher: `hydra.launcher`.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or is out of range.
    """
    if (kind := SETTINGS.get(name)) is None:
        return
    node = OmegaConf.to_container(launcher, resolve=True, throw_on_missing=True)
    assert isinstance(node, dict)
    kind(**check_part({key: value for key, value in node.items() if key != "_target_"}, kind, KEY))
