"""Launchers of sweeps: the presets of `conf/hydra/launcher`, and what they need beside kvbench."""

import shutil
import socket

from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from kvbench.cli.config.presets import EXTRAS
from kvbench.cli.sweeps.jobs import list_jobs
from kvbench.cli.sweeps.slurm_checks import LAUNCHER, check_tasks
from kvbench.core.config import ConfigError
from kvbench.core.gpus import resolve_device

PATIENCE = 10.0
"""Seconds in which a Ray cluster must accept a connection."""

LOCAL = ("basic", "joblib")
"""Launchers whose jobs run on this machine."""


def check_launcher(config: DictConfig) -> None:
    """Make sure that a sweep's launcher can start jobs from here.

    Args:
        config: composed for the sweep, with Hydra's part.

    Raises:
        ConfigError: the launcher is not installed, the machine belongs to no cluster, the cluster does not answer,
            jobs that run on this machine lack their GPU, or see `check_tasks`.
    """
    name, target = config.hydra.runtime.choices["hydra/launcher"], config.hydra.launcher._target_
    if name in EXTRAS and target not in Plugins.instance().class_name_to_class:
        raise ConfigError(f"hydra/launcher={name}: install the `{EXTRAS[name]}` extra, which has it")
    if name == LAUNCHER:
        if shutil.which("srun") is None:
            raise ConfigError(
                f"hydra/launcher={name}: finds no srun; start the sweep on a machine of the cluster"
            )
        check_tasks(config)
    if name == "ray":
        _check_address(str(config.hydra.launcher.ray.init.address))
    if name in LOCAL and (device := resolve_device(str(config.get("device")))).startswith("cuda"):
        from kvbench.core.devices import check_device  # imports torch

        check_device(device)
        if name == "joblib":
            _check_cards(config, device)


def _check_cards(config: DictConfig, device: str) -> None:
    """Refuse more jobs at a time than there are GPUs for."""
    import joblib
    import torch

    jobs = config.work.workers if config.get("task") == "work" else len(list_jobs(config))
    beside = min(jobs, joblib.effective_n_jobs(config.hydra.launcher.n_jobs))
    cards = 1 if ":" in device else torch.cuda.device_count()
    if beside > cards:
        raise ConfigError(
            f"hydra.launcher.n_jobs={config.hydra.launcher.n_jobs}: {beside} jobs at a time, and device="
            f"{device} is {cards} GPU{'s' if cards > 1 else ''} here; set hydra.launcher.n_jobs={cards}"
        )


def _check_address(address: str) -> None:
    """Connect to a Ray cluster that is named as `host:port`; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host, int(port)), PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"hydra.launcher.ray.init.address={address}: nobody answers ({error}); start the cluster, or leave it out "
            "to use this machine"
        ) from None
