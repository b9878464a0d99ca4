"""Jobs of a sweep that an earlier call has finished, recorded without being started."""

from collections.abc import Sequence
from pathlib import Path
from socket import gethostname

from hydra.core.hydra_config import HydraConfig

from kvbench.cli.config.compose import compose_job, count_processes, find_finished, read_values
from kvbench.cli.config.messages import EXPECTED
from kvbench.cli.console import say
from kvbench.cli.sweeps.jobs import Entry, read_entry, write_entry


def record_finished(folder: Path, number: int, words: Sequence[str], shared: Sequence[str]) -> Path | None:
    """Record a job whose run is finished, and return the run's folder; None for every other job.

    Hydra takes fifty milliseconds to start a job; this takes fewer and imports no torch.

    Args:
        folder: folder of the sweep.
        number: number of the job.
        words: overrides of the job.
        shared: Hydra's own overrides.
    """
    entry, held = read_entry(folder, number, tuple(words)), HydraConfig.instance().cfg
    if entry.outcome == "dropped":
        return None
    try:
        cfg, _ = compose_job([*shared, *words])
        count_processes(cfg)
        outcome = find_finished(read_values(cfg)) if cfg.task == "run" else None
    except EXPECTED:  # the job itself reports its error
        return None
    finally:
        HydraConfig.instance().cfg = held
    if outcome is None or outcome.results is None:
        return None
    run = str(outcome.folder)
    if (entry.outcome, entry.folder) != ("finished", run):
        samples, starts = {run: outcome.results.n}, entry.starts + 1
        finished = Entry(
            number, entry.overrides, "finished", run, samples=samples, starts=starts, host=gethostname()
        )
        write_entry(folder, finished)
    say(f"found finished: {run}   {' '.join(words)}")
    return outcome.folder
