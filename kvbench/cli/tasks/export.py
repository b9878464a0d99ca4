"""`task=export`: finished runs as data frames, or what a static method keeps as a policy file."""

from pathlib import Path

from omegaconf import DictConfig

from kvbench.cli.console import say
from kvbench.core.settings import Settings


def export(cfg: DictConfig, settings: Settings) -> list[Path]:
    """Run `task=export`: write a policy, or frames of all finished runs and of their samples; return the files."""
    if settings.export.policy is not None:
        from kvbench.cli.tasks.job import make_job  # imports torch
        from kvbench.policy import export_policy

        paths = [Path(settings.export.policy).expanduser()]
        export_policy(make_job(cfg, settings), paths[0])
    else:
        from kvbench.data.frames import export_frames

        paths = export_frames(settings.runs_dir, settings.export.format, settings.writes)
    for path in paths:
        say(f"written: {path}")
    return paths
