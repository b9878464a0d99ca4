"""Checks of a command's options, and of its words about Hydra's own keys."""

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence

from hydra._internal.utils import get_args_parser

from kvbench.cli.config.command import SWEEP_TASKS, Command
from kvbench.core.config import ConfigError, shorten

COMMANDS = ("run", "multirun", "cfg", "info", "shell_completion")
"""Options of Hydra that exclude each other."""
UNSUPPORTED = ("config_path", "config_name", "config_dir", "experimental_rerun")
"""Options of Hydra for other configurations than kvbench's."""
OPTIONS = "-m, -v, --help, --version, --cfg, --info and --shell-completion"
"""Options that messages suggest."""
ALWAYS = ("hydra.searchpath", "hydra.verbose", "hydra.job_logging", "hydra/job_logging")
"""Keys of Hydra that every command reads."""
SWEEPS = (
    "hydra/launcher",
    "hydra.launcher",
    "hydra.job.env_set",
    "hydra.job.env_copy",
    "hydra/hydra_logging",
    "hydra.hydra_logging",
)
"""Keys of Hydra that sweeps read, too."""
REMEDIES: Mapping[str, str] = {
    "hydra.run": "set runs_dir= for the folder of runs",
    "hydra.sweep": "set runs_dir= for the folder of runs",
    "hydra.output_subdir": "every run folder holds its config.yaml",
    "hydra/output": "every run folder holds its config.yaml",
    "hydra.mode": "add -m for a sweep",
    "hydra.sweeper": "write lists of values in the command, or in a file of conf/sweeps",
    "hydra/sweeper": "write lists of values in the command, or in a file of conf/sweeps",
    "hydra.callbacks": "write a logger (docs/extending.md) and set logger=",
    "hydra/callbacks": "write a logger (docs/extending.md) and set logger=",
}
"""Remedies for keys of Hydra that kvbench does not read."""


def parse_options(arguments: Sequence[str]) -> Namespace:
    """Parse the words of a command as Hydra does.

    Raises:
        ConfigError: an option is unknown, lacks its value, or does not fit the others.
    """
    parser = get_args_parser()
    known = {name for action in parser._actions for name in action.option_strings}
    for word in arguments:
        if word.startswith("-") and word.partition("=")[0] not in known:
            raise ConfigError(f"{shorten(word)}: no such option; there are {OPTIONS}; settings are key=value")
    parser.error = _refuse  # type: ignore[method-assign,assignment]
    parsed = parser.parse_args(list(arguments))
    for name in UNSUPPORTED:
        if getattr(parsed, name) is not None:
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{option}: not supported; name a folder with more files by hydra.searchpath=[file://folder]"
            )
    if len(commands := [f"--{name}" for name in COMMANDS if getattr(parsed, name)]) > 1:
        raise ConfigError(f"{' and '.join(commands)}: exclude each other; leave out {commands[0]}")
    for name in ("resolve", "package"):
        if getattr(parsed, name) and parsed.cfg is None and not (name == "resolve" and parsed.help):
            raise ConfigError(f"--{name}: only with --cfg; add --cfg job, or leave it out")
    return parsed


def _refuse(message: str) -> None:
    """Raise a message of argparse as ConfigError."""
    raise ConfigError(re.sub(r"^argument (--[\w-]+)(/-\w+)?", r"\1", " ".join(message.split())))


def check_hydra_words(command: Command) -> None:
    """Check that kvbench reads every key of Hydra that a command sets.

    Raises:
        ConfigError: it does not, or only in a sweep.
    """
    in_sweep = command.multirun or command.names_sweep or command.options or command.task in SWEEP_TASKS
    words = [word for word in command.overrides if "=" in word or word.startswith("~")]
    for word in words:  # others are values of options
        key = word.lstrip("+~").partition("=")[0].partition("@")[0]
        if not re.match(r"hydra\b", key) or _is_among(key, ALWAYS):
            continue
        if not _is_among(key, SWEEPS):
            remedy = next((text for name, text in REMEDIES.items() if _is_among(key, (name,))), None)
            raise ConfigError(f"{key}: not read by kvbench; " + (remedy or "leave it out"))
        if not in_sweep:
            raise ConfigError(f"{key}: only for sweeps; add -m, or leave it out")


def _is_among(key: str, names: Sequence[str]) -> bool:
    return any(re.match(rf"{re.escape(name)}(\.|$)", key) for name in names)
