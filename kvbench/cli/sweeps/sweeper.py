"""Jobs of a sweep: the product of its lists, plus reference methods (`beside.*`)."""

from collections.abc import Iterable, Mapping, Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from kvbench.cli.config.command import SWEEP_TASKS, name_base
from kvbench.cli.config.loader import parse_words
from kvbench.cli.config.words import check_lists, split_beside

OWN_KEYS = "sweep."
"""Prefix of the keys of a sweep that its jobs do not have."""
SWEEP_KEYS = ("against", "output", "verbose")
"""Keys, besides `work.*`, `sweep.*` and `report.*`, that are about the whole sweep and not about its jobs."""
_multiply = BasicSweeper.split_arguments


def split_product(overrides: Iterable[Override]) -> list[list[str]]:
    """Return the overrides of every job of a sweep.

    The jobs are the product of the lists of its own jobs, and after them that of its reference jobs (`split_beside`).

    Raises:
        ConfigError: a list is empty, there are too many jobs, or reference jobs have no method.
    """
    words = list(overrides)
    check_lists(words)
    jobs: list[list[str]] = []
    for part in split_beside(words):
        [product] = _multiply(part, None)
        named = [[name_base(word) for word in job] for job in product]
        jobs += [job for job in named if job not in jobs]
    return jobs


def list_jobs(config: DictConfig) -> list[tuple[str, ...]]:
    """Return the overrides of every job of a sweep, in order of job index; `config` includes the `hydra` node."""
    return split_jobs(config.hydra.sweeper.params, config.hydra.overrides.task)


def list_commands(config: DictConfig) -> list[list[str]]:
    """Return the overrides that run each job of `list_jobs`, with the keys about the whole sweep."""
    own = _parse(config.hydra.sweeper.params, config.hydra.overrides.task)
    return split_product(word for word in own if not word.key_or_group.startswith(OWN_KEYS))


def split_jobs(params: Mapping[str, object] | None, overrides: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the overrides of every job, in order of job index.

    Keys about the whole sweep are left out, and so is the index of the GPU.

    Args:
        params: `hydra.sweeper.params`.
        overrides: overrides of the command line, without Hydra's.
    """
    swept = (word for word in _parse(params, overrides) if not _is_about_whole_sweep(word))
    return [
        tuple("device=cuda" if word.startswith("device=cuda:") else word for word in job)
        for job in split_product(swept)
    ]


def _parse(params: Mapping[str, object] | None, overrides: Sequence[str]) -> list[Override]:
    return parse_words([*(f"{key}={value}" for key, value in (params or {}).items()), *overrides])


def _is_about_whole_sweep(word: Override) -> bool:
    key = word.key_or_group
    about = key in SWEEP_KEYS or key.startswith(("work.", "report.", OWN_KEYS))
    return about or (key == "task" and word.value() in SWEEP_TASKS)
