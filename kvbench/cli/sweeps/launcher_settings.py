"""Settings of the launchers in `conf/hydra/launcher`, checked before a sweep starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from kvbench.core.config import ConfigError, check_part, check_range, show

KEY = "hydra.launcher"
MAX_COUNT = 10**6
"""Upper limit of counts, minutes and gibibytes."""


@dataclass(frozen=True)
class JoblibSettings:
    """Settings of `hydra/launcher=joblib`, arguments of `joblib.Parallel`."""

    n_jobs: int = -1
    batch_size: int | Literal["auto"] = 1
    verbose: int = 0
    backend: Literal["loky", "multiprocessing"] | None = None
    timeout: float | None = None
    pre_dispatch: int | str = "2*n_jobs"
    temp_folder: str | None = None

    def __post_init__(self) -> None:
        if self.n_jobs != -1 and not 1 <= self.n_jobs <= MAX_COUNT:
            raise ConfigError(
                f"{KEY}.n_jobs={self.n_jobs}: must be at least 1, or -1 for the number of cores"
            )
        _check_counts(self, "batch_size")
        check_range(f"{KEY}.verbose", self.verbose, 0, MAX_COUNT)
        if self.timeout is not None and self.timeout <= 0:
            raise ConfigError(f"{KEY}.timeout={self.timeout}: must be a positive number of seconds")


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
    timeout_min: int | None = None
    max_num_timeout: int = 10
    signal_delay_s: int = 120
    array_parallelism: int = 256
    cpus_per_task: int | None = None
    cpus_per_gpu: int | None = None
    gpus_per_node: int | str | None = None
    gpus_per_task: int | str | None = None
    mem_gb: int | float | None = None
    mem_per_gpu: str | None = None
    mem_per_cpu: str | None = None
    nodes: int = 1
    tasks_per_node: int = 1
    stderr_to_stdout: bool = False
    setup: tuple[str, ...] | None = None
    srun_args: tuple[str, ...] | None = None
    additional_parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_counts(
            self,
            "timeout_min",
            "array_parallelism",
            "cpus_per_task",
            "cpus_per_gpu",
            "nodes",
            "tasks_per_node",
        )
        for name in ("max_num_timeout", "signal_delay_s"):
            check_range(f"{KEY}.{name}", getattr(self, name), 0, MAX_COUNT)
        for name in ("gpus_per_node", "gpus_per_task", "mem_gb"):
            if isinstance(value := getattr(self, name), int | float) and value <= 0:
                raise ConfigError(f"{KEY}.{name}={value}: must be positive; null leaves it to the cluster")
        if not self.submitit_folder or not self.name:
            empty = "name" if self.submitit_folder else "submitit_folder"
            raise ConfigError(f"{KEY}.{empty} is empty; leave it out")


@dataclass(frozen=True)
class RaySettings:
    """Settings of `hydra/launcher=ray`: arguments of `ray.init` and `ray.remote`."""

    ray: Mapping[str, Any]

    def __post_init__(self) -> None:
        for part in ("init", "remote"):
            if not isinstance(values := self.ray.get(part), Mapping):
                raise ConfigError(f"{KEY}.ray.{part}={show(values)}: must be a group of keys")
        address = self.ray["init"].get("address")
        if address is not None and not (isinstance(address, str) and address.strip()):
            raise ConfigError(f"{KEY}.ray.init.address={show(address)}: must be local, auto or host:port")
        for name, least in (("num_cpus", 0), ("num_gpus", 0), ("object_store_memory", 1)):
            self._check_number("init", name, least)
        for name, least in (("num_cpus", 0), ("num_gpus", 0), ("max_retries", -1)):
            self._check_number("remote", name, least)

    def _check_number(self, part: str, name: str, least: int) -> None:
        value, shares = self.ray[part].get(name), part == "remote" and name.startswith("num")
        kinds = int | float if shares else int
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, kinds) or not value >= least
        ):
            kind = "a number" if shares else "a whole number"
            raise ConfigError(f"{KEY}.ray.{part}.{name}={show(value)}: must be {kind} of at least {least}")


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
    values = check_part({key: value for key, value in node.items() if key != "_target_"}, kind, KEY)
    kind(**values)


def _check_counts(settings: object, *names: str) -> None:
    """Raise ConfigError if a count is below 1; text and None are no counts."""
    for name in names:
        if isinstance(value := getattr(settings, name), int):
            check_range(f"{KEY}.{name}", value, 1, MAX_COUNT)
