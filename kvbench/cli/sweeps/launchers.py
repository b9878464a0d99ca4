"""Launchers of sweeps: checks of the presets in `conf/hydra/launcher`."""

import shutil
import socket

from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from kvbench.cli.config.presets import EXTRAS
from kvbench.cli.sweeps.jobs import list_jobs
from kvbench.cli.sweeps.launcher_settings import check_launcher_settings
from kvbench.cli.sweeps.slurm_checks import LAUNCHER, check_tasks
from kvbench.core.config import ConfigError
from kvbench.core.gpus import resolve_device

CONNECT_TIMEOUT = 10.0
"""Seconds within which a Ray cluster must accept a connection."""

LOCAL = ("basic", "joblib")
"""Launchers whose jobs run on this machine."""


def check_launcher(config: DictConfig) -> None:
    """Check that a sweep's launcher can start jobs on this machine.

    Raises:
        ConfigError: the launcher is not installed, one of its settings is wrong, the cluster cannot be reached, a GPU
            is missing, or see `check_tasks`.
    """
    name, target = config.hydra.runtime.choices["hydra/launcher"], config.hydra.launcher._target_
    if name in EXTRAS and target not in Plugins.instance().class_name_to_class:
        raise ConfigError(f"hydra/launcher={name}: not installed; pip install 'kvbench[{EXTRAS[name]}]'")
    check_launcher_settings(name, config.hydra.launcher)
    if name == LAUNCHER:
        if shutil.which("srun") is None:
            raise ConfigError(
                f"hydra/launcher={name}: srun is not installed; start the sweep on a machine of the cluster"
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
    """Raise ConfigError if more jobs run at a time than there are GPUs."""
    import joblib
    import torch

    jobs = config.work.workers if config.get("task") == "work" else len(list_jobs(config))
    parallel = min(jobs, joblib.effective_n_jobs(config.hydra.launcher.n_jobs))
    cards = 1 if ":" in device else torch.cuda.device_count()
    if parallel > cards:
        raise ConfigError(
            f"hydra.launcher.n_jobs={config.hydra.launcher.n_jobs}: {parallel} jobs at a time, but device="
            f"{device} is {cards} GPU{'s' if cards > 1 else ''} here; set hydra.launcher.n_jobs={cards}"
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
