"""Options of the benchmarks as data; shared options have one description each."""

import argparse
from collections.abc import Mapping
from typing import Any

HELP = {
    "batch": "prompts of a batch",
    "budget": "share of the full cache, or tokens per head if above 1",
    "cpu_time": "measure processor time, for shared machines",
    "device": "cpu or cuda; the GPU if there is one by default",
    "method": "a single method of conf/method",
    "model": "model of conf/model",
    "overrides": "settings key=value as for run.py",
    "prompts": "number of prompts",
    "repeats": "measured repetitions; the median is reported",
    "threads": "threads of torch; torch's choice by default",
}
"""Descriptions of shared options, by name."""
TYPES = {"threads": {"type": int}}
"""Types of options with a default of None that are not strings."""


class Option:
    """Option of one benchmark.

    Args:
        default: default value, whose type is the option's; False makes a switch, a list accepts several values.
        description: text of `--help`.
        positional: whether it is positional.
        settings: other keywords of `argparse.ArgumentParser.add_argument`.
    """

    def __init__(
        self, default: object, description: str | None = None, *, positional: bool = False, **settings: Any
    ) -> None:
        self.positional = positional
        self.settings: dict[str, Any] = {"default": default, "help": description}
        if default is False:
            self.settings["action"] = "store_true"
        elif isinstance(default, list):
            self.settings |= {"type": type(next(iter(default), "")), "nargs": "+"}
        else:
            self.settings["type"] = str if default is None else type(default)
        self.settings |= settings


OVERRIDES: Mapping[str, object] = {"overrides": Option([], HELP["overrides"], positional=True, nargs="*")}
"""Trailing settings `key=value`."""


def add_options(parser: argparse.ArgumentParser, options: Mapping[str, object]) -> None:
    """Add options to a parser; a value by name is an `Option` or the default of an option in `HELP`."""
    for name, value in options.items():
        option = value if isinstance(value, Option) else Option(value, HELP[name], **TYPES.get(name, {}))
        parser.add_argument(name if option.positional else f"--{name.replace('_', '-')}", **option.settings)
