"""Options that several benchmarks share, with one meaning each."""

import argparse

HELP = {
    "batch": "prompts of a batch",
    "budget": "share of the full cache, or tokens per head if above 1",
    "cpu_time": "count processor time, for machines that others use too",
    "device": "cpu or cuda",
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
TYPES = {"threads": int}
"""Types of options whose default may be None and that are no text."""


def add_options(parser: argparse.ArgumentParser, *, overrides: bool = False, **defaults: object) -> None:
    """Add shared options by name and default.

    Args:
        parser: of the program.
        overrides: whether settings `key=value` may follow the options.
        defaults: the options of this program; a value has its default's type, False is a switch.
    """
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true", help=HELP[name])
        else:
            kind = TYPES.get(name, str if default is None else type(default))
            parser.add_argument(flag, type=kind, default=default, help=HELP[name])
    if overrides:
        parser.add_argument("overrides", nargs="*", help=HELP["overrides"])
