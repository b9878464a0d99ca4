"""Workers on a standing Ray cluster, each a detached actor that outlives the command."""

import math
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvbench.cli.console import say
from kvbench.cli.dispatch import run_worker
from kvbench.core.config import ConfigError

NAMESPACE = "kvbench"
"""Ray's namespace of the workers."""


class RayWorker:
    """Worker in its own actor; Ray restarts it if its process or node dies.

    The worker is a thread, because an actor has started only when its constructor returns. `folder` is its
    working directory, and `log` the file of its output.
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
    """Return whether a sweep's launcher is a Ray cluster that the sweep does not start itself."""
    is_ray = config.hydra.runtime.choices["hydra/launcher"] == "ray"
    return is_ray and config.hydra.launcher.ray.init.address not in (None, "local")


def submit_actors(config: DictConfig, words: Sequence[str], workers: int) -> None:
    """Start workers as detached actors and print how to watch and stop them.

    Args:
        config: configuration of the workers or the sweep, with Hydra's part; `work.folder` is the sweep's.
        words: overrides of a worker.
        workers: number of workers; workers beyond the cluster's capacity wait in Ray's queue.

    Raises:
        ConfigError: Ray cannot be reached, or a worker fits no machine of the cluster.
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
        capacity = sum(count_fitting(node["Resources"], remote) for node in ray.nodes() if node["Alive"])
        if capacity == 0:
            raise ConfigError(
                f"hydra.launcher.ray.remote: no machine of the cluster at {address} has num_cpus={remote['num_cpus']} "
                f"and num_gpus={remote['num_gpus']}; lower them"
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
            worker = ray.remote(RayWorker).options(name=name, **options)
            worker.remote([*words, f"work.number={number}"], str(Path.cwd()), str(log))
    finally:
        ray.shutdown()
    waiting = f" ({workers - capacity} of them when others end)" if workers > capacity else ""
    say(
        f"submitted {workers} workers{waiting} to the Ray cluster at {address}, output in {folder}/ray-*.log; "
        f"watch: task=status work.folder={folder}; stop: task=work work.folder={folder} work.do=stop; resume: run the "
        "same command again"
    )


def count_fitting(node: Mapping[str, float], remote: Mapping[str, Any]) -> int:
    """Return the number of workers with settings `remote` that fit on a node, given its resources by Ray's names."""
    required = {"CPU": remote["num_cpus"], "GPU": remote["num_gpus"], **(remote.get("resources") or {})}
    return min((math.floor(node.get(name, 0) / size) for name, size in required.items() if size), default=1)
