"""`task=profile`: time, memory and phases over batch sizes."""

from pathlib import Path

from omegaconf import DictConfig

from kvbench.cli.console import CONSOLE
from kvbench.cli.tasks.job import make_job
from kvbench.core.settings import Settings
from kvbench.profile.tables import profile_and_show


def profile(cfg: DictConfig, settings: Settings) -> list[Path]:
    """Do `task=profile`: measure time, memory and phases over batch sizes; return the written file."""
    return [profile_and_show(CONSOLE, make_job(cfg, settings))]
