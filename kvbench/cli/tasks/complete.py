"""One run from its composed configuration to its results, without anything printed."""

from dataclasses import replace

from omegaconf import DictConfig

from kvbench.cli.config.checks import check_runs_dir
from kvbench.cli.config.compose import find_finished, read_settings, read_values
from kvbench.cli.config.instantiate import list_targets
from kvbench.core.config import ConfigError
from kvbench.runs.record.results import Outcome


def complete(cfg: DictConfig, *, changed: bool = False) -> Outcome:
    """Complete a composed run, or find it finished, and return it with its results; Hydra must be initialised.

    Args:
        cfg: the configuration.
        changed: it was changed after its composition, so that no overrides compose it and none are recorded.

    Raises:
        UserError: a setting is wrong, weights are missing, or a method exceeds its budget.
        OSError: an error of the disk.
    """
    if (outcome := find_finished(read_values(cfg))) is None:
        from kvbench.cli.tasks.job import make_job  # these import torch
        from kvbench.core.devices import keep_freed_memory
        from kvbench.runs.calls import remember
        from kvbench.runs.execute import run

        settings = read_settings(cfg)
        check_runs_dir(settings, alone=True)
        keep_freed_memory()
        job = make_job(cfg, settings)
        outcome = run(replace(job, overrides=None) if changed else job)
        if not any(name.startswith("__main__.") for name in list_targets(job.config)):
            remember(job, outcome)  # a class of a notebook has no file whose change would show
    if outcome.results is None:
        raise ConfigError(
            "shard.count: other shards of the run are not finished; use the command line for shards"
        )
    return outcome
