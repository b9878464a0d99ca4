"""Workers in Slurm's queue: an array of jobs, one worker per task."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from kvbench.cli.console import say
from kvbench.cli.dispatch import run_worker
from kvbench.cli.sweeps.launchers import SLURM, count_tasks
from kvbench.core.config import ConfigError

if TYPE_CHECKING:  # submitit belongs to an extra
    from submitit import Job
    from submitit.helpers import DelayedSubmission


class SlurmWorker:
    """Worker in a task of a Slurm job; submitit calls it at every start of the job."""

    def __call__(self, words: list[str]) -> None:
        """Run a worker."""
        run_worker(words)

    def checkpoint(self, words: list[str]) -> "DelayedSubmission":
        """Return the same call, which the job runs after it is requeued at its time limit."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, words)


def submit(config: DictConfig, words: Sequence[str], workers: int) -> "Sequence[Job[None]]":
    """Submit workers as one array of Slurm jobs, print how to watch and stop them, and return the jobs.

    Args:
        config: configuration of the workers or the sweep, with Hydra's part; `work.folder` is the sweep's.
        words: overrides of a worker.
        workers: number of workers, a multiple of a job's processes.

    Raises:
        ConfigError: Slurm rejects the job.
    """
    from submitit import AutoExecutor

    options, timeouts, output = _read_options(config)
    tasks = count_tasks(config.hydra.launcher)
    with naming_rejection():
        executor = AutoExecutor(output, cluster="slurm", slurm_max_num_timeout=timeouts)
        executor.update_parameters(**options)
        numbered = [[*words, f"work.number={number}"] for number in range(0, workers, tasks)]
        jobs = executor.map_array(SlurmWorker(), numbered)
    number, folder = jobs[0].job_id.partition("_")[0], config.work.folder
    say(
        f"submitted {workers} workers, {tasks} to a job, as array {number}, output in "
        f"{jobs[0].paths.folder.with_name(number)}*; watch: task=status work.folder={folder}; pause: "
        f"task=work work.folder={folder} work.do=pause; stop: scancel {number}; resume: run the same command again"
    )
    return jobs


@contextmanager
def naming_rejection() -> Iterator[None]:
    """Raise a rejection by Slurm as a ConfigError of one line; errors of jobs that ran are left as they are."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        yield
    except (FailedJobError, FailedSubmissionError, NameError) as error:
        if isinstance(error, FailedJobError) and error.__cause__ is None:  # a job's, not sbatch's
            raise
        why = " ".join(str(error).split("\n  ")[0].split())
        raise ConfigError(f"hydra/launcher={SLURM}: Slurm rejects the job ({why})") from None


def _read_options(config: DictConfig) -> tuple[dict[str, Any], int, str]:
    """Return submitit's options, the number of requeues at the time limit, and the folder of the workers' output."""
    launcher: dict[str, Any] = OmegaConf.to_container(config.hydra.launcher, resolve=True)  # type: ignore[assignment]
    own = ("_target_", "submitit_folder", "max_num_timeout")
    options = {f"slurm_{key}": value for key, value in launcher.items() if key not in own}
    variables = [f"export {key}={shlex.quote(value)}" for key, value in config.hydra.job.env_set.items()]
    options["slurm_setup"] = [*variables, *(launcher["setup"] or [])]
    return options, launcher["max_num_timeout"], launcher["submitit_folder"]
