"""Extensions of Hydra's basic sweeper and launcher: reference methods, and jobs that are finished already."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus

from kvbench.cli.console import say
from kvbench.cli.sweeps.finished import record_finished
from kvbench.cli.sweeps.jobs import list_jobs, name_folder
from kvbench.cli.sweeps.sweeper import OWN_KEYS, split_product

LAUNCH = BasicLauncher.launch
"""Hydra's own method, which `extend_sweeper` may replace in this class."""


def extend_sweeper() -> None:
    """Make Hydra's basic sweeper use `split_product`, and its basic launcher start only jobs that are not finished.

    Other classes would need a package of Hydra plugins.
    """

    def split(overrides: list[Override], max_batch_size: int | None) -> list[list[list[str]]]:
        words = [override for override in overrides if not override.key_or_group.startswith(OWN_KEYS)]
        return list(BasicSweeper.split_overrides_to_chunks(split_product(words), max_batch_size))

    # The launcher would log each job as a sweep of one.
    logging.getLogger(BasicLauncher.__module__).setLevel(logging.WARNING)
    classes: Any = Plugins.instance().class_name_to_class  # Hydra loads the modules a second time
    classes[f"{BasicSweeper.__module__}.{BasicSweeper.__name__}"].split_arguments = staticmethod(split)
    classes[f"{BasicLauncher.__module__}.{BasicLauncher.__name__}"].launch = _launch_missing


def _launch_missing(
    launcher: BasicLauncher, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
) -> list[JobReturn]:
    """Start the jobs that are not finished, one after the other; `BasicLauncher.launch` starts all."""
    config: Any = launcher.config
    folder = name_folder(Path(config.runs_dir).expanduser(), list_jobs(config))
    returns: list[JobReturn] = []
    for number, words in enumerate(job_overrides, initial_job_idx):
        run = record_finished(folder, number, words, config.hydra.overrides.hydra)
        if run is None:
            say(f"job {number}: {' '.join(words)}")
            returns.extend(LAUNCH(launcher, [words], number))
        else:
            returns.append(JobReturn(overrides=words, status=JobStatus.COMPLETED, _return_value=run))
    return returns
