"""Checks of a command's options."""

import re
from argparse import Namespace
from collections.abc import Sequence

from hydra._internal.utils import get_args_parser

from kvbench.core.config import ConfigError, shorten

COMMANDS = ("run", "multirun", "cfg", "info", "shell_completion")
"""Options of Hydra that exclude each other."""
UNSUPPORTED = ("config_path", "config_name", "config_dir", "experimental_rerun")
"""Options of Hydra for other configurations than kvbench's."""
OPTIONS = "-m, -v, --help, --version, --cfg, --info and --shell-completion"
"""Options that messages suggest."""


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
