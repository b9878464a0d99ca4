"""Folder of a sweep, found or made from the words of a command."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from hydra.conf import HydraConf
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from kvbench.cli.config.command import write_value
from kvbench.cli.config.compose import compose_job, hydra_of_kvbench, read_settings
from kvbench.cli.config.loader import parse_words
from kvbench.cli.config.messages import EXPECTED
from kvbench.cli.config.search_path import check_search_path
from kvbench.cli.console import say
from kvbench.cli.sweeps.jobs import find_folder, find_named, name_folder, name_sweep
from kvbench.cli.sweeps.sweeper import split_jobs
from kvbench.core.config import ConfigError, check_part
from kvbench.core.settings import SweepSettings
from kvbench.runs.record.sweeps import read_entry

READERS = ("status", "report")
"""Tasks that read the results of a sweep's jobs and change nothing."""


def compose_sweep(words: Sequence[str]) -> tuple[DictConfig, HydraConf]:
    """Return the shared configuration of a sweep's jobs, with `work.folder` set, and Hydra's; Hydra is initialised.

    Raises:
        HydraException, OmegaConfBaseException: an override matches no key.
        ConfigError: the sweep or its folder does not exist, or a setting is wrong.
    """
    cfg, hydra_cfg, parsed = _compose_shared(words)
    is_listed = hydra_cfg.runtime.choices.get("sweeps") or any(word.is_sweep_override() for word in parsed)
    runs_dir, name = Path(cfg.runs_dir).expanduser(), _read_name(cfg)
    if cfg.task not in READERS:
        read_settings(cfg)  # errors are raised before a folder is made
    if cfg.work.folder is not None:
        if not Path(cfg.work.folder).is_dir():
            raise ConfigError(f"work.folder={cfg.work.folder}: no such folder; runs_dir/sweeps has them")
    elif name is not None and not is_listed:
        cfg.work.folder = str(find_named(runs_dir, name))
    else:
        if (cfg.task != "work" or cfg.work.do is not None) and not runs_dir.is_dir():
            raise ConfigError(f"runs_dir={cfg.runs_dir}: holds no runs")
        jobs = _list_jobs(hydra_cfg, parsed)
        must_exist = cfg.task in READERS or cfg.work.do is not None
        folder = name_folder(runs_dir, jobs) if must_exist else find_folder(runs_dir, jobs)
        if not folder.is_dir():
            raise ConfigError(
                f"task={cfg.task}: no sweep with these overrides was started in {runs_dir}; repeat its "
                "overrides, or set work.folder= or sweep.name="
            )
        if not must_exist:
            name_sweep(folder, name)
        cfg.work.folder = str(folder)
    return cfg, hydra_cfg


def announce(words: Sequence[str], *, every: bool = False) -> list[tuple[str, ...]]:
    """Print the name, the folder and the number of jobs of a sweep; nothing if a word is wrong, which is checked next.

    Args:
        words: words of the command without `-m`.
        every: also print the overrides of every job, by its index.

    Returns:
        The unfinished jobs that are checked before the first one (`sweep.check`).
    """
    try:
        with hydra_of_kvbench():
            check_search_path()
            cfg, hydra_cfg, parsed = _compose_shared(words)
            jobs, name = _list_jobs(hydra_cfg, parsed), _read_name(cfg)
            folder = name_folder(Path(cfg.runs_dir).expanduser(), jobs)
            title = "sweep" if name is None else f"sweep {name}"
            say(f"{title}: {len(jobs)} job{'s' * (len(jobs) != 1)}, {folder}")
            for number, job in enumerate(jobs if every else ()):
                say(f"{number:>{len(str(len(jobs)))}}  {shlex.join(job)}")
            return list_checked(cfg, folder, jobs)
    except (*EXPECTED, TypeError):  # `runs_dir` may have another type
        return []


def list_checked(cfg: DictConfig, folder: Path, jobs: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the unfinished jobs of a sweep if they are checked before the first job starts, else none."""
    if cfg.sweep.check is not True:
        return []
    entries = (read_entry(folder, number, job) for number, job in enumerate(jobs))
    return [entry.overrides for entry in entries if entry.outcome != "finished"]


def _compose_shared(words: Sequence[str]) -> tuple[DictConfig, HydraConf, list[Override]]:
    """Compose what the jobs of a sweep share; also return the parsed overrides."""
    parsed = parse_words(words)
    shared = [str(word.input_line) for word in parsed if not word.is_sweep_override()]
    return *compose_job(shared), parsed


def _list_jobs(hydra_cfg: HydraConf, parsed: Sequence[Override]) -> list[tuple[str, ...]]:
    """Return the overrides of each job of a sweep."""
    own = [str(word.input_line) for word in parsed if not word.is_hydra_override()]
    return split_jobs(hydra_cfg.sweeper.params, own)


def _read_name(cfg: DictConfig) -> str | None:
    """Return `sweep.name`; raise ConfigError if it is wrong."""
    section = (
        OmegaConf.to_container(cfg.sweep, resolve=True) if isinstance(cfg.sweep, DictConfig) else cfg.sweep
    )
    return SweepSettings(**check_part(section, SweepSettings, "sweep")).name  # type: ignore[arg-type]


def list_worker_words(cfg: DictConfig, words: Sequence[str]) -> list[str]:
    """Return the overrides that all workers of a sweep share; overrides of Hydra choose the launcher."""
    shared = {"work.folder": cfg.work.folder, "runs_dir": cfg.runs_dir}
    return [
        *(word for word in words if word.lstrip("+~").startswith("hydra")),
        "task=work",
        *(f"{key}={write_value(value)}" for key, value in shared.items()),
        f"device={cfg.device}",
        *(f"work.{key}={cfg.work[key]}" for key in ("lapse", "workers", "grace", "jitter")),
    ]
