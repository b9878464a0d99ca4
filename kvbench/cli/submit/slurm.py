"""Workers in Slurm's queue: one array of jobs, each of whose tasks is a worker."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from kvbench.cli.console import CONSOLE
from kvbench.cli.dispatch import run_worker
from kvbench.cli.sweeps.slurm_checks import LAUNCHER, count_tasks
from kvbench.core.config import ConfigError

if TYPE_CHECKING:  # of an extra
    from submitit import Job
    from submitit.helpers import DelayedSubmission


class Start:
    """Start of a worker in a task of a Slurm job; submitit calls it, again if the job was queued again."""

    def __call__(self, words: list[str]) -> None:
        """Work as words of the command line say."""
        run_worker(words)

    def checkpoint(self, words: list[str]) -> "DelayedSubmission":
        """Return what the job does when time runs out and it queues itself again: the same."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, words)


def submit(config: DictConfig, words: Sequence[str], workers: int) -> "Sequence[Job[None]]":
    """Submit workers as one array of Slurm jobs, print how to look and how to stop, and return the jobs.

    Args:
        config: composed for the workers or for their sweep, with Hydra's part; `work.folder` is the sweep's.
        words: of the command line of a worker.
        workers: a multiple of the processes of a job.

    Raises:
        ConfigError: Slurm refuses the job.
    """
    from submitit import AutoExecutor
    from submitit.core.utils import FailedJobError

    options, timeouts, output = _read_options(config)
    tasks = count_tasks(config.hydra.launcher)
    try:
        executor = AutoExecutor(output, cluster="slurm", slurm_max_num_timeout=timeouts)
        executor.update_parameters(**options)
        numbered = [[*words, f"work.number={number}"] for number in range(0, workers, tasks)]
        jobs = executor.map_array(Start(), numbered)
    except (FailedJobError, NameError) as error:
        why = " ".join(str(error).split("\n  ")[0].split())
        raise ConfigError(f"hydra/launcher={LAUNCHER}: Slurm refuses the job ({why})") from None
    number, folder = jobs[0].job_id.partition("_")[0], config.work.folder
    line = (
        f"submitted {workers} workers, {tasks} to a job, as array {number}, output in "
        f"{jobs[0].paths.folder.with_name(number)}*; task=status work.folder={folder} shows how far they are, "
        f"task=work work.folder={folder} work.do=pause holds them, scancel {number} stops them, and the same command "
        "goes on"
    )
    CONSOLE.print(line, highlight=False, markup=False, soft_wrap=True)
    return jobs


def _read_options(config: DictConfig) -> tuple[dict[str, Any], int, str]:
    """Return submitit's options, how often time may run out, and the folder of what workers print."""
    launcher: dict[str, Any] = OmegaConf.to_container(config.hydra.launcher, resolve=True)  # type: ignore[assignment]
    own = ("_target_", "submitit_folder", "max_num_timeout")
    options = {f"slurm_{key}": value for key, value in launcher.items() if key not in own}
    variables = [f"export {key}={shlex.quote(value)}" for key, value in config.hydra.job.env_set.items()]
    options["slurm_setup"] = [*variables, *(launcher["setup"] or [])]
    return options, launcher["max_num_timeout"], launcher["submitit_folder"]
