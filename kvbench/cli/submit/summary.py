"""Sweeps: independent jobs, where one failure does not stop the others, and a common table at the end."""

import logging
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from kvbench.cli.config.instantiate import instantiate
from kvbench.cli.config.messages import describe_error, is_expected
from kvbench.cli.console import CONSOLE, show_device
from kvbench.cli.submit.background import leave
from kvbench.cli.submit.ray import runs_by_itself, submit_actors
from kvbench.cli.submit.slurm import submit
from kvbench.cli.sweeps.folder import list_worker_words
from kvbench.cli.sweeps.jobs import Recorder, claim_of, list_jobs, open_folder, read_entries, recording
from kvbench.cli.sweeps.launchers import LOCAL, check_launcher
from kvbench.cli.sweeps.outcomes import describe_failure, list_failures, list_runs
from kvbench.cli.sweeps.progress import watch
from kvbench.cli.sweeps.slurm_checks import LAUNCHER, count_tasks
from kvbench.core.claims import claim
from kvbench.core.gpus import resolve_device

if TYPE_CHECKING:  # imports numpy, and Hydra makes the callback for `--help` too
    from kvbench.runs.record.results import Results

log = logging.getLogger(__name__)


def end_or_describe(error: Exception) -> str:
    """Return why a job of a sweep failed, see `describe_failure`; outside a sweep the program ends.

    Raises:
        SystemExit: there is no other job to save.
        Exception: neither is there, and the error is our fault.
    """
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        return describe_failure(error)
    if not is_expected(error):
        raise error
    sys.exit(f"error: {describe_error(error, sys.argv[1:])}")


@contextmanager
def _ending_if_broken() -> Iterator[None]:
    """End the program where a callback breaks: Hydra would warn, and a sweep without its jobs' list seem to be well."""
    try:
        yield
    except Exception as error:
        if not is_expected(error):
            log.exception("the sweep broke")
        sys.exit(f"error: {describe_error(error, sys.argv[1:])}")


def show_sweep(config: DictConfig, folder: Path, name: str) -> bool:
    """Print the tables of what a sweep's jobs have left, and send them where its runs were sent.

    Args:
        config: composed for the sweep.
        folder: the sweep's.
        name: the choice of `sweeps`, or the folder's name.

    Returns:
        Whether every job is finished.
    """
    from kvbench.report.calibrations import show_calibrations
    from kvbench.report.collect import read_runs, read_with_bounds, read_with_references
    from kvbench.report.papers import (
        comparison as published_comparison,  # imports torch, and Hydra makes the callback for `--help` too
    )
    from kvbench.report.papers.published import find
    from kvbench.report.runs_table import show_runs

    entries = read_entries(folder)
    folders, failures = list_runs(entries), list_failures(entries)
    runs_dir = Path(config.runs_dir).expanduser()
    show_runs(CONSOLE, read_with_bounds(folders), failures)
    show_calibrations(CONSOLE, read_runs(folders), runs_dir, folder, config.against)
    if config.published is not None:
        table = find(config.published)
        if table.figure == "stability":
            model, sinks = str(config.model.name), int(config.sinks)
            artifacts = [Path(file) for entry in entries for file in entry.files]
            published_comparison.show_stability(CONSOLE, table, artifacts, sinks, model, runs_dir)
        else:
            published_comparison.show_beside(CONSOLE, table, read_with_references(folders), runs_dir)
    if config.logger and (runs := read_runs(folders)):
        _send(config, folder, name, runs)
    return not failures


def _send(config: DictConfig, folder: Path, name: str, runs: "Sequence[Results]") -> None:
    """Send a sweep and the page of all runs to its logger."""
    from kvbench.dashboard.page import write_dashboard

    page = None
    if find_spec("jinja2") is not None:  # of an extra
        page = write_dashboard(Path(config.runs_dir).expanduser())
    instantiate(config.logger).send_sweep(folder, name, runs, page)


def leave_sweep(config: DictConfig, folder: Path) -> None:
    """Have a sweep's jobs done by workers that nobody waits for.

    There are as many workers as jobs; in Slurm's queue, as many as fit into the Slurm jobs that may run at a time.
    """
    with open_dict(config):
        config.work.folder = str(folder)
    launcher, workers = config.hydra.launcher, len(list_jobs(config))
    if config.hydra.runtime.choices["hydra/launcher"] == LAUNCHER:
        tasks = count_tasks(launcher)
        workers = min(math.ceil(workers / tasks), launcher.array_parallelism) * tasks
    leave_workers(config, folder, list_worker_words(config, config.hydra.overrides.hydra), workers)


def leave_workers(config: DictConfig, folder: Path, words: Sequence[str], workers: int) -> None:
    """Have a sweep done without this process: by workers of Slurm or of a Ray cluster, else in the background.

    Args:
        config: composed for the workers or for their sweep, with Hydra's part.
        folder: the sweep's.
        words: of the command line of a worker.
        workers: how many Slurm or Ray is given; in the background the same command chooses.
    """
    if config.hydra.runtime.choices["hydra/launcher"] == LAUNCHER:
        submit(config, words, workers)
    elif runs_by_itself(config):
        submit_actors(config, words, workers)
    else:
        leave(folder)


class Summary(Callback):
    """After a sweep: one table of all jobs, a published one beside it, and a failing exit status if any job failed.

    Every job writes its outcome into the sweep's folder (`kvbench.cli.sweeps.jobs`), in whatever process it runs: a
    launcher gives each a copy of this object.

    Attributes:
        running: the sweep that has begun and not ended; its launcher may break.
    """

    running: ClassVar["Summary | None"] = None
    _sweep: ClassVar[ExitStack] = ExitStack()
    _job: ClassVar[ExitStack] = ExitStack()

    def __init__(self) -> None:
        self._folder: Path | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: object) -> None:
        """Make sure that the launcher can start, and write down which jobs there will be."""
        with _ending_if_broken():
            check_launcher(config)
        if config.hydra.runtime.choices["hydra/launcher"] in LOCAL:  # others choose where they run
            show_device(config.device)
        if config.get("task") == "work":  # the sweep is not this one, of workers
            return
        with _ending_if_broken():
            self._config = config
            self._folder = open_folder(Path(config.runs_dir).expanduser(), list_jobs(config))
            if not config.work.wait:
                leave_sweep(config, self._folder)
                sys.exit()
            Summary.running = self
            Summary._sweep.enter_context(watch(self._folder))

    def on_job_start(self, config: DictConfig, **kwargs: object) -> None:
        """Write that a job runs."""
        if self._folder is None:  # one job by itself
            return
        number, overrides = config.hydra.job.num, tuple(config.hydra.overrides.task)
        if (
            config.hydra.runtime.choices["hydra/launcher"] == "joblib"
            and resolve_device(config.device) == "cuda"
        ):
            from kvbench.core.devices import take_gpu  # imports torch

            take_gpu("cuda", number)
        Summary._job.enter_context(claim(claim_of(self._folder, number), wait=False, lapse=config.work.lapse))
        Summary._job.enter_context(recording(self._folder, number, overrides))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: object) -> None:
        """Write what a job left: its run folder, its calibrations, or why it failed."""
        if (recorder := Recorder.current) is None:
            return
        recorder.note_end(job_return._return_value)
        Summary._job.close()

    def on_multirun_end(self, config: DictConfig, **kwargs: object) -> None:
        """Print the tables."""
        with _ending_if_broken():
            self.show()

    def show(self) -> None:
        """Print the tables of what is there; the program ends with a failing status if a job failed or is missing."""
        if self._folder is None:
            return
        Summary.running = None
        Summary._sweep.close()
        choice = OmegaConf.select(self._config, "hydra.runtime.choices.sweeps")
        if not show_sweep(self._config, self._folder, choice or self._folder.name):
            sys.exit(1)
