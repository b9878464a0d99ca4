"""Checks of a Slurm launcher's settings."""

from omegaconf import DictConfig

from kvbench.core.config import ConfigError

LAUNCHER = "submitit_slurm"
"""Choice of `hydra/launcher`."""


def count_tasks(launcher: DictConfig) -> int:
    """Return the number of processes in one Slurm job of a launcher."""
    return int(launcher.nodes * launcher.tasks_per_node)


def check_tasks(config: DictConfig) -> None:
    """Check that each process of a Slurm job can be a worker with its own GPU.

    Raises:
        ConfigError: a job would run in several processes, a node has fewer GPUs than processes, or the number of
            workers is no multiple of a job's processes.
    """
    launcher, tasks = config.hydra.launcher, count_tasks(config.hydra.launcher)
    key = f"hydra.launcher.tasks_per_node={launcher.tasks_per_node}"
    if tasks > 1 and config.get("task") != "work" and config.work.wait:
        raise ConfigError(f"{key}: only for workers; set task=work or work.wait=false, or leave it out")
    cards = launcher.get("gpus_per_node")
    if cards and launcher.tasks_per_node > cards:
        raise ConfigError(
            f"{key}: more workers than GPUs of a node (hydra.launcher.gpus_per_node={cards}); set "
            f"hydra.launcher.tasks_per_node={cards}"
        )
    if config.get("task") == "work" and config.work.workers % tasks:
        up = -(-config.work.workers // tasks) * tasks
        raise ConfigError(
            f"work.workers={config.work.workers}: not a multiple of the {tasks} workers of a job ({key}, "
            f"hydra.launcher.nodes={launcher.nodes}); set work.workers={up}"
        )
