"""`task=profile`: time, memory and phases over batch sizes."""

from pathlib import Path

from omegaconf import DictConfig

from kvbench.cli.console import CONSOLE
from kvbench.cli.sweeps.jobs import Recorder
from kvbench.cli.tasks.job import make_job
from kvbench.core.settings import Settings
from kvbench.profile.tables import profile_and_show
from kvbench.profile.task import find_measured


def profile(cfg: DictConfig, settings: Settings) -> list[Path]:
    """Run `task=profile`: measure time, memory and phases over batch sizes; return the written file.

    A resumed sweep measures no job again.
    """
    job = make_job(cfg, settings)
    found = None if Recorder.current is None else find_measured(job)
    return [found or profile_and_show(CONSOLE, job)]
