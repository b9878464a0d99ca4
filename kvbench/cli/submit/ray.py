"""Workers on a Ray cluster that runs by itself: one detached actor each, which outlives the command."""

import math
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvbench.cli.console import CONSOLE
from kvbench.cli.dispatch import run_worker
from kvbench.core.config import ConfigError

RAY = "ray"
"""Choice of `hydra/launcher`."""
NAMESPACE = "kvbench"
"""Ray's namespace of the workers."""


class Start:
    """Start of a worker in an actor of its own; Ray starts it again where its process or its node dies.

    The worker is a thread: Ray takes an actor for started when its constructor returns.

    Args:
        words: of the command line of the worker.
        folder: where the command was started.
        log: file for what the worker prints.
    """

    def __init__(self, words: list[str], folder: str, log: str) -> None:
        import ray

        self._actor = ray.get_runtime_context().current_actor
        threading.Thread(target=self._work, args=(words, folder, log), daemon=True).start()

    def _work(self, words: list[str], folder: str, log: str) -> None:
        import ray

        try:
            os.chdir(folder)
            with Path(log).open("ab") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            run_worker(words)
        finally:
            ray.kill(self._actor, no_restart=True)


def runs_by_itself(config: DictConfig) -> bool:
    """Return whether a sweep's launcher is a Ray cluster that was there before the sweep.

    Args:
        config: composed for the sweep, with Hydra's part.
    """
    if config.hydra.runtime.choices["hydra/launcher"] != RAY:
        return False
    return config.hydra.launcher.ray.init.address not in (None, "local")


def submit_actors(config: DictConfig, words: Sequence[str], workers: int) -> None:
    """Start workers as detached actors, and print how to look and how to stop.

    Args:
        config: composed for the workers or for their sweep, with Hydra's part; `work.folder` is the sweep's.
        words: of the command line of a worker.
        workers: how many; those that do not fit into the cluster start when there is room.

    Raises:
        ConfigError: Ray cannot be reached, or no machine of the cluster has room for a worker.
    """
    import ray

    settings: dict[str, Any] = OmegaConf.to_container(config.hydra.launcher.ray, resolve=True)  # type: ignore[assignment]
    folder, remote = Path(config.work.folder), settings["remote"]
    address = settings["init"]["address"]
    quiet = {"log_to_driver": False, "logging_level": "ERROR", "namespace": NAMESPACE}
    try:
        ray.init(**{**settings["init"], **quiet})
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"hydra.launcher.ray.init.address={address}: {error}") from None
    try:
        room = sum(count_fitting(node["Resources"], remote) for node in ray.nodes() if node["Alive"])
        if room == 0:
            raise ConfigError(
                f"hydra.launcher.ray.remote: no machine of the cluster at {address} has num_cpus={remote['num_cpus']} "
                f"and num_gpus={remote['num_gpus']}"
            )
        options = {
            **{key: value for key, value in remote.items() if key != "max_retries"},
            "max_restarts": remote["max_retries"],
            "lifetime": "detached",
            "scheduling_strategy": "SPREAD",
            "runtime_env": {"env_vars": dict(config.hydra.job.env_set)},
        }
        for number in range(workers):
            name = f"{folder.name}-{number}-{uuid.uuid4().hex[:8]}"
            log = folder.resolve() / f"ray-{number:03}.log"
            start = ray.remote(Start).options(name=name, **options)
            start.remote([*words, f"work.number={number}"], str(Path.cwd()), str(log))
    finally:
        ray.shutdown()
    waiting = f" ({workers - room} of them when there is room)" if workers > room else ""
    line = (
        f"submitted {workers} workers{waiting} to the Ray cluster at {address}, output in {folder}/ray-*.log; "
        f"task=status work.folder={folder} shows how far they are, task=work work.folder={folder} work.do=stop ends "
        "them after their blocks, and the same command goes on"
    )
    CONSOLE.print(line, highlight=False, markup=False, soft_wrap=True)


def count_fitting(node: Mapping[str, float], remote: Mapping[str, Any]) -> int:
    """Return how many workers fit into a machine.

    Args:
        node: what the machine has, by Ray's names of resources.
        remote: settings of `hydra.launcher.ray.remote`.
    """
    wanted = {"CPU": remote["num_cpus"], "GPU": remote["num_gpus"], **(remote.get("resources") or {})}
    return min((math.floor(node.get(name, 0) / size) for name, size in wanted.items() if size), default=1)
