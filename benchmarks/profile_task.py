"""`task=profile` without Hydra: the overrides and the output of `python run.py task=profile`.

python -m benchmarks profile_task model=infinity_2b model.weights=random device=cuda method=heatkv budget=0.1
"""

import argparse
import sys

from rich.console import Console

from benchmarks.support.arguments import OVERRIDES
from benchmarks.support.build import built, choices, composed
from kvbench.core.settings import Settings
from kvbench.profile.tables import profile_and_show
from kvbench.runs.job import Job

OPTIONS = OVERRIDES


def main(options: argparse.Namespace) -> None:
    """Measure, print, write."""
    overrides = [*options.overrides, "task=profile"]
    values = composed(overrides)
    settings = Settings.of(values)
    prompts = built(values["prompts"])
    job = Job(
        settings=settings,
        model=built(values["model"]),
        method=built(values["method"]),
        method_name=choices(overrides)["method"],
        prompts=prompts.load(),
        config=values,
        calibration_prompts=prompts.load_others(settings.calibrate.count, settings.calibrate.seed),
    )
    profile_and_show(Console(width=None if sys.stdout.isatty() else 160), job)
