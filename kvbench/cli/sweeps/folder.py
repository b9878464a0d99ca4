"""Sweep folders: which command-line words make a sweep, and the folder of its jobs."""

from collections.abc import Sequence
from pathlib import Path

from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from kvbench.cli.config.compose import compose_job, read_settings
from kvbench.cli.sweeps.jobs import find_folder, is_about_sweep, name_folder, split_jobs
from kvbench.core.config import ConfigError

MULTIRUN = ("-m", "--multirun")
READERS = ("status", "report")
"""Tasks that read what a sweep's jobs have left, and change nothing of it."""
OF_ALL_RUNS = ("task=dashboard", "task=export")
"""Tasks that are about every run, whatever sweep is named beside them."""


def names_sweep(words: Sequence[str]) -> bool:
    """Return whether words choose a file of `conf/sweeps`, for a task that means its jobs."""
    chosen = any(word.startswith("sweeps=") and word != "sweeps=null" for word in words)
    return chosen and not any(word in OF_ALL_RUNS for word in words)


def find_words(arguments: Sequence[str]) -> list[str] | None:
    """Return the overrides of a command whose task is about a sweep as a whole, with or without `-m`; else None.

    `task=report` is about every finished run unless a sweep is named, by its words or its folder.
    """
    words = [word for word in arguments if word not in MULTIRUN]
    if any(word.startswith("-") for word in words):
        return None
    asked = next((word for word in words if is_about_sweep(word)), None)
    whole = asked is not None and (
        asked != "task=report" or names_sweep(words) or _names_folder(words) or _lists_values(words)
    )
    return words if whole else None


def find_reading_words(arguments: Sequence[str]) -> list[str] | None:
    """Return the overrides of a command whose task reads all runs, and that `-m` makes no sweep; else None.

    Raises:
        ConfigError: it lists several values, which only jobs can have.
    """
    words = [word for word in arguments if word not in MULTIRUN]
    asked = next((word for word in words if word in ("task=report", *OF_ALL_RUNS)), None)
    if asked is None or len(words) == len(arguments) or any(word.startswith("-") for word in words):
        return None
    if _lists_values(words):
        raise ConfigError(f"{asked}: is about all runs; leave out -m and lists of values")
    return words


def _lists_values(words: Sequence[str]) -> bool:
    """Return whether some word lists several values, as those of a sweep do."""
    try:
        return any(word.is_sweep_override() for word in OverridesParser.create().parse_overrides(list(words)))
    except HydraException:  # what cannot be read is reported where it is composed
        return False


def _names_folder(words: Sequence[str]) -> bool:
    return any(word.startswith("work.folder=") for word in words)


def compose_sweep(words: Sequence[str]) -> tuple[DictConfig, HydraConf]:
    """Compose what the jobs of a sweep share, its folder in `work.folder`; Hydra must be initialised.

    Raises:
        HydraException, OmegaConfBaseException: an override that fits nothing.
        ConfigError: there is no such sweep.
    """
    parsed = OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(list(words))
    cfg, hydra_cfg = compose_job([str(word.input_line) for word in parsed if not word.is_sweep_override()])
    runs_dir = Path(cfg.runs_dir).expanduser()
    if cfg.task not in READERS:
        read_settings(cfg)  # refuses what is out of range before a folder is made
    if cfg.work.folder is None:
        if (cfg.task != "work" or cfg.work.do is not None) and not runs_dir.is_dir():
            raise ConfigError(f"runs_dir={cfg.runs_dir}: holds no runs")
        given = [str(word.input_line) for word in parsed if not word.is_hydra_override()]
        jobs = split_jobs(hydra_cfg.sweeper.params, given)
        known = cfg.task in READERS or cfg.work.do is not None  # rather than begun now
        folder = name_folder(runs_dir, jobs) if known else find_folder(runs_dir, jobs)
        if not folder.is_dir():
            raise ConfigError(
                f"task={cfg.task}: no sweep with these overrides was started in {runs_dir}; repeat those that "
                "started it, or set work.folder="
            )
        cfg.work.folder = str(folder)
    elif not Path(cfg.work.folder).is_dir():
        raise ConfigError(f"work.folder={cfg.work.folder}: no such folder; runs_dir/sweeps has them")
    return cfg, hydra_cfg


def list_worker_words(cfg: DictConfig, words: Sequence[str]) -> list[str]:
    """Return what the workers of a sweep have in common where a launcher starts them.

    Args:
        cfg: composed for the sweep.
        words: of the command line; those that set Hydra itself choose the launcher.
    """
    shared = {"work.folder": cfg.work.folder, "runs_dir": cfg.runs_dir}
    return [
        *(word for word in words if word.lstrip("+~").startswith("hydra")),
        "task=work",
        *(f"{key}='{str(value).replace(chr(39), chr(92) + chr(39))}'" for key, value in shared.items()),
        f"device={cfg.device}",
        *(f"work.{key}={cfg.work[key]}" for key in ("lapse", "workers", "grace", "jitter")),
    ]
