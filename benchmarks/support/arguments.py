"""Options of the benchmarks as data: those that several share have one meaning each."""

import argparse
from collections.abc import Mapping
from typing import Any

HELP = {
    "batch": "prompts of a batch",
    "budget": "share of the full cache, or tokens per head if above 1",
    "cpu_time": "count processor time, for machines that others use too",
    "device": "cpu or cuda; the GPU if there is one by default",
    "method": "only this one, of conf/method",
    "methods": "of conf/method, separated by commas",
    "model": "of conf/model",
    "overrides": "settings key=value, as for run.py",
    "prompts": "number of prompts",
    "repeats": "measured repetitions, of which the median is reported",
    "slope": "also print how a step's time grows with the tokens before it",
    "threads": "threads of torch; its own choice by default",
    "tokens": "tokens to generate",
}
"""Descriptions by name of the option."""
TYPES = {"threads": {"type": int}}
"""Types of options whose default may be None and that are no text."""


class Option:
    """An option that one program has.

    Args:
        default: a value has its default's type, False is a switch, and a list takes several values.
        description: for `--help`.
        positional: whether it is given without its name.
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
"""For programs whose options settings `key=value` may follow."""


def add_options(parser: argparse.ArgumentParser, options: Mapping[str, object]) -> None:
    """Add options to a parser: by name an `Option`, or the default of one in `HELP`."""
    for name, given in options.items():
        option = given if isinstance(given, Option) else Option(given, HELP[name], **TYPES.get(name, {}))
        parser.add_argument(name if option.positional else f"--{name.replace('_', '-')}", **option.settings)
