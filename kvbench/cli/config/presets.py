"""Presets of launchers, `conf/hydra/launcher`."""

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

EXTRAS = {"joblib": "joblib", "submitit_slurm": "slurm", "ray": "ray"}
"""Extra of kvbench that each preset needs."""


def use_presets() -> None:
    """Remove the configurations that the launchers' packages store under the presets' names.

    Hydra would take them for schemas of the presets.
    """
    Plugins.instance()  # imports the packages
    stored = ConfigStore.instance().repo["hydra"]["launcher"]
    for name in EXTRAS:
        stored.pop(f"{name}.yaml", None)
