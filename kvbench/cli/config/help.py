"""Help on one screen, from the header of Hydra's long help, and the message for a mistyped command."""

import re
from collections.abc import Collection
from importlib.resources import files

import yaml

from kvbench.core.config import ConfigError
from kvbench.core.settings import TASKS
from kvbench.core.suggestions import find_near

HELP = ("-h", "--help", "help")


def read_help() -> str:
    """Return the help as `conf/config.yaml` has it; `--help -v` goes on with every choice and key."""
    header: str = yaml.safe_load(read_config())["hydra"]["help"]["header"]
    return header.rstrip()


def read_config() -> str:
    """Return the text of `conf/config.yaml`."""
    return files("kvbench.conf").joinpath("config.yaml").read_text(encoding="utf-8")


def check_verb(word: str, commands: Collection[str]) -> None:
    """Check that the first word of a command line is a setting or an option; it is none of the commands.

    Raises:
        ConfigError: it is a plain word.
    """
    if re.fullmatch(r"[A-Za-z]\w*", word):
        near = find_near(word.lower(), (*commands, *TASKS))
        meant = "" if near is None else f" did you mean {'task=' * (near in TASKS)}{near}?"
        verbs = ", ".join(commands)
        raise ConfigError(
            f"{word}: no such command;{meant} there are {verbs}; settings are key=value (kvbench --help)"
        )
