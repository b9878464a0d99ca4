"""Extensions of Hydra's basic sweeper and launcher: reference methods, and jobs that are finished already."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job
from omegaconf import open_dict

from kvbench.cli.config.checks import count_processes
from kvbench.cli.config.compose import compose_job, find_finished, read_values
from kvbench.cli.config.loader import compose_words, keep_files
from kvbench.cli.config.messages import EXPECTED
from kvbench.cli.console import say
from kvbench.cli.sweeps.jobs import Recorder, name_folder, read_entry
from kvbench.cli.sweeps.sweeper import OWN_KEYS, list_jobs, split_product


def extend_sweeper() -> None:
    """Make Hydra's basic sweeper use `split_product`, and its basic launcher start only jobs that are not finished.

    Other classes would need a package of Hydra plugins.
    """

    def split(overrides: list[Override], max_batch_size: int | None) -> list[list[list[str]]]:
        keep_files()
        words = [override for override in overrides if not override.key_or_group.startswith(OWN_KEYS)]
        return list(BasicSweeper.split_overrides_to_chunks(split_product(words), max_batch_size))

    classes: Any = Plugins.instance().class_name_to_class  # Hydra loads the modules a second time
    classes[f"{BasicSweeper.__module__}.{BasicSweeper.__name__}"].split_arguments = staticmethod(split)
    classes[f"{BasicLauncher.__module__}.{BasicLauncher.__name__}"].launch = _launch_missing


def _launch_missing(
    launcher: BasicLauncher, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
) -> list[JobReturn]:
    """Start the jobs that are not finished, one after the other; `BasicLauncher.launch` starts all.

    Jobs are composed with caches, which Hydra's own method does not do.
    """
    given: Any = launcher  # Hydra has set its attributes
    config = given.config
    folder = name_folder(Path(config.runs_dir).expanduser(), list_jobs(config))
    returns: list[JobReturn] = []
    for number, words in enumerate(job_overrides, initial_job_idx):
        run = record_finished(folder, number, words, config.hydra.overrides.hydra)
        if run is None:
            if config.task not in ("run", "evaluate"):  # jobs of these two are printed when they end
                say(f"job {number}: {' '.join(words)}")
            job = compose_words([*config.hydra.overrides.hydra, *words])
            with open_dict(job):
                job.hydra.job.id = job.hydra.job.num = number
            places = "hydra.sweep.dir", "hydra.sweep.subdir"
            returns.append(run_job(given.task_function, job, *places, given.hydra_context))
            configure_log(config.hydra.hydra_logging, config.hydra.verbose)
        else:
            returns.append(JobReturn(overrides=words, status=JobStatus.COMPLETED, _return_value=run))
    return returns


def record_finished(folder: Path, number: int, words: Sequence[str], shared: Sequence[str]) -> Path | None:
    """Record a job whose run is finished, and return the run's folder; None for every other job.

    Hydra takes fifty milliseconds to start a job; this takes fewer and imports no torch.

    Args:
        folder: folder of the sweep.
        number: number of the job.
        words: overrides of the job.
        shared: Hydra's own overrides.
    """
    entry, held = read_entry(folder, number, tuple(words)), HydraConfig.instance().cfg
    if entry.outcome == "dropped":
        return None
    try:
        cfg, _ = compose_job([*shared, *words])
        count_processes(cfg)
        outcome = find_finished(read_values(cfg)) if cfg.task == "run" else None
    except EXPECTED:  # the job itself reports its error
        return None
    finally:
        HydraConfig.instance().cfg = held
    if outcome is None or outcome.results is None:
        return None
    if (entry.outcome, entry.folder) != ("finished", str(outcome.folder)):
        recorder = Recorder(folder, number, tuple(words), is_leader=True)
        recorder.note(
            outcome="finished", folder=str(outcome.folder), samples={str(outcome.folder): outcome.results.n}
        )
    return outcome.folder
