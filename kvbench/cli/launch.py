"""Jobs of a sweep, one after the other in this process or by a launcher of Hydra, and their tables."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import env_override
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from kvbench.cli.config.checks import count_processes
from kvbench.cli.config.compose import compose_job, find_finished, hydra_of_kvbench, read_values
from kvbench.cli.config.loader import compose_words, keep_files, parse_words
from kvbench.cli.config.messages import EXPECTED
from kvbench.cli.console import say, show_device
from kvbench.cli.dispatch import configure_logging, run_task
from kvbench.cli.streams import repair_streams
from kvbench.cli.submit.slurm import naming_rejection, submit
from kvbench.cli.submit.summary import (
    show_sweep,
    start_in_background,
    start_sweep_workers,
    start_workers,
    watch_jobs,
)
from kvbench.cli.sweeps.jobs import Recorder, claim_of, label_sweep, name_sweep, open_folder, recording
from kvbench.cli.sweeps.launchers import LOCAL, SLURM, check_launcher
from kvbench.cli.sweeps.outcomes import describe_failure, list_profiles, list_runs
from kvbench.cli.sweeps.sweeper import list_commands, list_jobs
from kvbench.cli.workers.sigterm import interrupting_on_sigterm
from kvbench.core.claims import claim
from kvbench.core.config import ConfigError
from kvbench.core.gpus import resolve_device
from kvbench.runs.record.sweeps import read_entries, read_entry, read_name

if TYPE_CHECKING:  # submitit belongs to an extra
    from submitit import Job

IN_SWEEP = "hydra.mode=MULTIRUN"
"""Override that marks the jobs of a sweep."""


def run_sweep(words: Sequence[str]) -> None:
    """Run the jobs of a sweep and print its tables; with `work.wait=false`, only start workers. Hydra is initialised.

    Args:
        words: overrides of the command without `-m`.

    Raises:
        ConfigError: the launcher cannot start jobs here.
        SystemExit: a job failed or is missing.
    """
    parsed = parse_words(words)
    config = compose_words(
        [str(word.input_line) for word in parsed if not word.is_sweep_override()] + [IN_SWEEP]
    )
    config.hydra.overrides.task = [str(word.input_line) for word in parsed if not word.is_hydra_override()]
    configure_logging(config.hydra)
    check_launcher(config)
    launcher = config.hydra.runtime.choices["hydra/launcher"]
    if launcher in LOCAL:  # other launchers choose the machine
        show_device(config.device)
    folder = open_folder(Path(config.runs_dir).expanduser(), list_jobs(config))
    name_sweep(folder, config.sweep.name)
    if not config.work.wait:
        start_sweep_workers(config, folder)
        return
    try:
        with watch_jobs(config, folder):
            if launcher == "basic":
                run_in_turn(config, folder)
            else:
                launch(config, SweepJob(folder, config.work.lapse), list_commands(config))
    except Exception as error:  # the launcher broke before it reported all jobs
        describe_failure(error)
    entries = read_entries(folder)
    label = label_sweep(folder, config.hydra.runtime.choices.get("sweeps"))
    is_whole = show_sweep(config, folder, label, entries)
    if list_runs(entries) or list_profiles(entries):  # a report reads nothing else
        name, shown = read_name(folder), config.published
        words = ["task=report", f"work.folder={folder}" if name is None else f"sweep.name={name}"]
        if shown is not None:
            words.append(f"published={shown if isinstance(shown, str) else '[' + ','.join(shown) + ']'}")
        say(f"these tables again: {' '.join(words)}")
    if not is_whole:
        sys.exit(1)


def run_workers(cfg: DictConfig, choices: Mapping[str, str], words: list[str]) -> None:
    """Run the workers of a sweep and print its tables; with `work.wait=false`, only start them. Hydra is initialised.

    Args:
        cfg: configuration of the sweep.
        choices: choices of the configuration by group.
        words: overrides of a worker.

    Raises:
        ConfigError: the launcher cannot start them.
        SystemExit: a job failed or is missing.
    """
    launcher = choices["hydra/launcher"]
    folder, workers = Path(cfg.work.folder), cfg.work.workers
    queued: Sequence[Job[None]] = ()
    if launcher == "basic":
        if workers > 1:
            raise ConfigError(
                f"work.workers={workers}: hydra/launcher=basic starts one worker; set hydra/launcher=joblib, "
                "or leave out work.workers and start this command once per worker"
            )
        if not cfg.work.wait:
            start_in_background(folder)
            return
    else:
        launched = hydra.compose("config", overrides=[*words, IN_SWEEP], return_hydra_config=True)
        check_launcher(launched)
        if not cfg.work.wait:
            start_workers(launched, folder, words, workers)
            return
        queued = submit(launched, words, workers) if launcher == SLURM else ()
    with watch_jobs(cfg, folder):
        if launcher == "basic":
            run_task(cfg)
        elif launcher != SLURM:
            own = launched.hydra.overrides.task
            launch(launched, run_launched_worker, [[*own, f"work.number={one}"] for one in range(workers)])
        for job in queued:
            job.wait()
    label = label_sweep(folder, choices.get("sweeps"))
    if not show_sweep(cfg, folder, label, read_entries(folder)):
        sys.exit(1)


@interrupting_on_sigterm()
def launch(config: DictConfig, task: TaskFunction, jobs: Sequence[list[str]]) -> None:
    """Have the launcher of a configuration do a task with the overrides of each job, and wait for all jobs.

    Hydra composes jobs without the choices of their models' files, so that tasks compose them again.
    """
    keep_files()
    context = HydraContext(GlobalHydra.instance().config_loader(), Callbacks())
    launcher = Plugins.instance().instantiate_launcher(context, task, config)
    is_slurm = config.hydra.runtime.choices["hydra/launcher"] == SLURM
    with naming_rejection() if is_slurm else nullcontext():
        launcher.launch(jobs, initial_job_idx=0)


@interrupting_on_sigterm()
def run_in_turn(config: DictConfig, folder: Path) -> None:
    """Run the jobs of a sweep that are not finished in this process, one after the other."""
    shared, jobs = config.hydra.overrides.hydra, list_commands(config)
    for words in jobs:
        compose_words([*shared, *words])  # errors are raised before the first job
    with env_override(config.hydra.job.env_set):
        for number, words in enumerate(jobs):
            if config.task not in ("run", "evaluate"):  # jobs of these two are printed when they end
                say(f"job {number}: {' '.join(words)}")
            run_recorded(folder, number, words, shared, config.work.lapse)


def run_recorded(
    folder: Path, number: int, words: Sequence[str], shared: Sequence[str], lapse: float
) -> None:
    """Run a job of a sweep and record its start and its end; record a run that is finished already; skip a dropped job.

    Finding a finished run here avoids the import of torch.

    Args:
        folder: folder of the sweep.
        number: index of the job.
        words: overrides of the job.
        shared: Hydra's own overrides.
        lapse: seconds after which other processes take over the claim of this one if it is killed.
    """
    job, cfg, finished = (folder, number, tuple(words)), None, None
    if (entry := read_entry(*job)).outcome == "dropped":
        return
    with hydra_of_kvbench(), suppress(*EXPECTED):  # the job itself reports its error
        cfg, _ = compose_job([*shared, *words])
        count_processes(cfg)
        finished = find_finished(read_values(cfg)) if cfg.task == "run" else None
    if finished is not None and finished.results is not None:
        run = str(finished.folder)
        if (entry.outcome, entry.folder) != ("finished", run):
            recorder = Recorder(*job, is_leader=True)
            recorder.note(outcome="finished", folder=run, samples={run: finished.results.n})
        return
    with claim(claim_of(folder, number), wait=False, lapse=lapse), recording(*job) as recorder:
        recorder.note_end(run_words([*shared, *words], cfg))


def run_words(words: list[str], cfg: DictConfig | None = None) -> object:
    """Run the job of overrides, and compose it if `cfg` is None; return its task's result, or its error as one line."""
    try:
        with hydra_of_kvbench():
            return run_task(compose_job(words)[0] if cfg is None else cfg)
    except Exception as error:
        return describe_failure(error)


@dataclass(frozen=True)
class SweepJob:
    """Picklable task of launchers that runs a job of the sweep in `folder`; see `run_recorded` for `lapse`."""

    folder: Path
    lapse: float

    def __call__(self, config: DictConfig) -> None:
        """Run the job that Hydra has composed in this process."""
        repair_streams()
        own = HydraConfig.get()
        if own.runtime.choices["hydra/launcher"] == "joblib" and resolve_device(config.device) == "cuda":
            from kvbench.core.devices import take_gpu  # imports torch

            take_gpu("cuda", own.job.num)
        run_recorded(self.folder, own.job.num, own.overrides.task, own.overrides.hydra, self.lapse)


def run_launched_worker(_: DictConfig) -> None:
    """Run the worker that Hydra has composed in this process: the task of launchers for workers."""
    repair_streams()
    overrides = HydraConfig.get().overrides
    run_words([*overrides.hydra, *overrides.task])
