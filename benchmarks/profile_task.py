"""`task=profile` without Hydra, with the overrides and output of `python run.py task=profile`.

python -m benchmarks profile_task model=infinity_2b model.weights=random device=cuda method=heatkv budget=0.1
"""

import argparse
import sys

from rich.console import Console

from benchmarks.support.arguments import OVERRIDES
from benchmarks.support.jobs import make_job
from kvbench.profile.tables import profile_and_show

OPTIONS = OVERRIDES


def main(options: argparse.Namespace) -> None:
    """Measure a profile, print its tables and write it as JSON."""
    job = make_job([*options.overrides, "task=profile"])
    profile_and_show(Console(width=None if sys.stdout.isatty() else 160), job)
