"""Jobs made without Hydra, which takes a second to start."""

from collections.abc import Sequence

from benchmarks.support.build import built, choices, composed
from kvbench.core.settings import Settings
from kvbench.runs.job import Job


def make_job(overrides: Sequence[str]) -> Job:
    """Return the job of `python run.py <overrides>`."""
    values = composed(overrides)
    settings = Settings.of(values)
    prompts = built(values["prompts"])
    return Job(
        settings=settings,
        model=built(values["model"]),
        method=built(values["method"]),
        method_name=choices(overrides)["method"],
        prompts=prompts.load(),
        config=values,
        calibration_prompts=prompts.load_others(settings.calibrate.count, settings.calibrate.seed),
    )
