"""`task=merge`: runs and calibrations of other folders, copied into `runs_dir`."""

from pathlib import Path

from omegaconf import DictConfig

from kvbench.cli.console import say
from kvbench.core.config import ConfigError
from kvbench.core.settings import Settings
from kvbench.runs.record.earlier import list_earlier, note_earlier
from kvbench.runs.record.merge import merge_runs


def merge(_: DictConfig, settings: Settings) -> None:
    """Run `task=merge`: copy runs and calibrations of other folders into `runs_dir`; print a line for each conflict.

    Raises:
        ConfigError: a folder is missing or holds no runs, or something was in conflict and not merged.
    """
    if not settings.sources:
        raise ConfigError(
            "from: missing; task=merge from=other/runs names a folder of runs, from=[a,b] several"
        )
    sources = [Path(source).expanduser() for source in settings.sources]
    for source in sources:
        if not source.is_dir():
            raise ConfigError(f"from={source}: no such folder")
        if settings.runs_dir.exists() and source.samefile(settings.runs_dir):
            raise ConfigError(f"from={source}: is runs_dir itself; name another folder")
    found = [
        (source, list(merge_runs(source, settings.runs_dir)), list_earlier(source)) for source in sources
    ]
    if empty := [source for source, own, earlier in found if not (own or earlier)]:
        raise ConfigError(f"from={empty[0]}: holds no runs; name a folder like runs_dir")
    merged = [one for _, own, _ in found for one in own]
    if note := note_earlier([folder for _, _, earlier in found for folder in earlier]):
        say(note)
    problems = [one for one in merged if one.problem is not None]
    for one in problems:
        say(f"conflict: {one.name}: {one.problem}")
    added, known = sum(one.added for one in merged), sum(one.known for one in merged)
    counts = f"merged {len(merged)} runs and calibrations: {added} samples added, {known} known"
    say(f"{counts}; {len(problems)} conflicts")
    if problems:
        raise ConfigError(f"task=merge: {len(problems)} conflicts; delete a kept run to take the other one")
