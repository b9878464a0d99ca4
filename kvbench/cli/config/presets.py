"""Presets of launchers, `conf/hydra/launcher`."""

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

EXTRAS = {"joblib": "joblib", "submitit_slurm": "slurm", "ray": "ray"}
"""Presets, and the extra of kvbench that has what each of them starts."""


def use_presets() -> None:
    """Make each preset the only configuration of its name.

    The launchers' packages store theirs under the same names, and Hydra would take those for the presets' schemas.
    """
    Plugins.instance()  # imports the packages, which store theirs
    stored = ConfigStore.instance().repo["hydra"]["launcher"]
    for name in EXTRAS:
        stored.pop(f"{name}.yaml", None)
