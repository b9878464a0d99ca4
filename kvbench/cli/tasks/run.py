"""`task=run`, `task=evaluate` and `task=bounds`."""

from pathlib import Path

from omegaconf import DictConfig

from kvbench.cli.console import CONSOLE, say
from kvbench.cli.sweeps.jobs import Recorder, note_run
from kvbench.cli.tasks.job import make_job
from kvbench.core.config import ConfigError
from kvbench.core.processes import leave
from kvbench.core.settings import Settings
from kvbench.report.collect import read_runs
from kvbench.report.one_run import show_outcome, show_run
from kvbench.report.runs_table import show_runs
from kvbench.runs.calls import remember
from kvbench.runs.execute import rescore
from kvbench.runs.execute import run as execute
from kvbench.runs.generate.batch import run_follower


def run(cfg: DictConfig, settings: Settings) -> Path | None:
    """Run `task=run`: one run with its reference and calibration.

    If several processes share the model, the first one conducts the run and the others follow.

    Returns:
        The run's folder; None while other shards generate, and in a process that follows.
    """
    job = make_job(cfg, settings)
    if job.model.processes.rank > 0:
        run_follower(job)
        leave()
        return None
    outcome = execute(job, note_run)
    job.model.processes.broadcast(None)
    leave()
    if outcome.results is None:
        say(f"this shard's share is done; the run is complete when the others are: {outcome.folder}")
        return None
    remember(job, outcome)
    if Recorder.current is None:  # else the sweep prints it
        show_outcome(CONSOLE, outcome, verbose=settings.verbose)
    return outcome.folder


def evaluate(cfg: DictConfig, settings: Settings) -> Path:
    """Run `task=evaluate`: add metrics to a finished run without generating again; return its folder."""
    outcome = rescore(make_job(cfg, settings))
    assert outcome.results is not None
    if Recorder.current is None:  # else the sweep prints it
        show_run(CONSOLE, outcome.results, verbose=settings.verbose)
    return outcome.folder


def run_bounds(cfg: DictConfig, settings: Settings) -> None:
    """Run `task=bounds`: run the full cache with a different batch size and with other seeds, against the full cache.

    Raises:
        ConfigError: the settings are not those of the full cache in 16 or 32 bits.
    """
    job = make_job(cfg, settings)
    if not job.is_reference or settings.budget != 1:
        given = f"method={job.method_name}, budget={settings.budget}, cache_dtype={settings.cache_dtype}"
        raise ConfigError(f"task=bounds: compares full caches in 16 or 32 bits; leave out {given}")
    show_runs(CONSOLE, read_runs([execute(bound).folder for bound in job.bounds()]))
