"""Words of a command line, parsed once."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

MULTIRUN = ("-m", "--multirun")
SHORT_FORMS = dict.fromkeys(("-v", "--verbose"), "verbose=true")
"""Words that abbreviate an override."""
SWEEP_TASKS = ("work", "status", "report")
"""Tasks about a sweep as a whole."""
ALL_RUNS_TASKS = ("dashboard", "export")
"""Tasks about every run, even if the command names a sweep."""


@dataclass(frozen=True)
class Command:
    """A command line of overrides and options.

    Attributes:
        words: all words, short forms expanded.
        overrides: `words` without `-m`.
        options: options of Hydra other than `-m`, such as `--cfg`.
        task: value of `task=`; None without it.
        names_sweep: whether `sweeps=` chooses a sweep and the task is about its jobs.
        names_folder: whether `work.folder=` or `sweep.name=` is given.
    """

    words: tuple[str, ...]
    overrides: tuple[str, ...]
    options: tuple[str, ...]
    task: str | None
    names_sweep: bool
    names_folder: bool

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> "Command":
        """Parse the words of a command line."""
        words = tuple(list_single_values([name_base(SHORT_FORMS.get(word, word)) for word in arguments]))
        overrides = tuple(word for word in words if word not in MULTIRUN)
        values = dict(word.split("=", 1) for word in overrides if "=" in word)
        task = values.get("task")
        return cls(
            words=words,
            overrides=overrides,
            options=tuple(word for word in overrides if word.startswith("-")),
            task=task,
            names_sweep=values.get("sweeps", "null") != "null" and task not in ALL_RUNS_TASKS,
            names_folder="work.folder" in values or "sweep.name" in values,
        )

    @property
    def multirun(self) -> bool:
        """Whether `-m` is given."""
        return len(self.overrides) < len(self.words)

    @property
    def is_one_job(self) -> bool:
        """Whether the command consists of overrides only: no `-m` and no option of Hydra."""
        return not (self.multirun or self.options)

    @property
    def is_about_sweep(self) -> bool:
        """Whether the task is about a sweep as a whole, with or without `-m`.

        `task=report` is about all finished runs unless words or a folder name a sweep.
        """
        if self.options or self.task not in SWEEP_TASKS:
            return False
        return self.task != "report" or self.finds_sweep()

    @property
    def is_about_all_sweeps(self) -> bool:
        """Whether the command is `task=status` and names no sweep."""
        return self.task == "status" and not (self.options or self.finds_sweep())

    def finds_sweep(self) -> bool:
        """Return whether words of the command name a sweep or list the values of one."""
        return self.names_sweep or self.names_folder or bool(self.list_sweeps())

    @property
    def is_about_all_runs(self) -> bool:
        """Whether the task reads all runs, so that `-m` makes no sweep of it."""
        reads_all = self.task in ("report", *ALL_RUNS_TASKS)
        return reads_all and not (self.options or self.is_about_sweep)

    def list_sweeps(self) -> list[str]:
        """Return the overrides that list several values, as in a sweep."""
        return [str(one.input_line) for one in _parse(self.overrides) if one.is_sweep_override()]


def name_base(word: str) -> str:
    """Return an override that chooses a method's base, or prompts, by name in Hydra's syntax; any other unchanged.

    >>> name_base("method.base=h2o"), name_base("method.base.base=rkv,h2o"), name_base("method.base.sinks=2")
    ('method@method.base=h2o', 'method@method.base.base=rkv,h2o', 'method.base.sinks=2')
    >>> name_base("prompts.of=scenes")
    'prompts@prompts.of=scenes'
    """
    word = re.sub(r"^prompts\.of=(?=[a-z])", "prompts@prompts.of=", word)
    return re.sub(r"^method((?:\.base)+)=(?=[a-z_])", r"method@method\1=", word)


def list_single_values(words: Sequence[str]) -> list[str]:
    """Return the words of a command, where a key of a group with several choices has its value as a list of one.

    Hydra composes the shared part of a sweep without its lists. There, the group has the choice of conf/config.yaml, to
    which the key may be unknown.

    >>> list_single_values(["-m", "method=pricekv,lukv", "method.queries=32", "budget=0.1"])
    ['-m', 'method=pricekv,lukv', 'method.queries=choice(32)', 'budget=0.1']
    """
    if not any("," in word for word in words):
        return list(words)
    parsed = {str(override.input_line): override for override in _parse(words)}
    groups = tuple(f"{_find_key(one)}." for one in parsed.values() if one.is_sweep_override())
    inner = {word for word, one in parsed.items() if _find_key(one).startswith(groups)}
    return [_list_value(word) if word in inner and _has_one_value(parsed[word]) else word for word in words]


def _has_one_value(override: Override) -> bool:
    return not (override.is_sweep_override() or override.is_delete())


def _list_value(word: str) -> str:
    """Return an override of one value as a list of it, of which Hydra's sweeper makes the same override."""
    key, _, value = word.partition("=")
    return f"{key}=choice({value.strip() or repr('')})"


def _parse(words: Sequence[str]) -> list[Override]:
    """Parse the overrides among words; none if one cannot be parsed, which composition reports."""
    try:
        return OverridesParser.create().parse_overrides([word for word in words if word[:1] != "-"])
    except HydraException:
        return []


def _find_key(override: Override) -> str:
    """Return the key that an override sets: of a group, where its choice is placed."""
    return override.package or override.key_or_group
