"""Sweeps: a job that fails stops no other, and one table ends them all."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from kvbench.cli.console import CONSOLE
from kvbench.cli.jobs import Entry, list_jobs, open_folder, read_entries, write_entry
from kvbench.cli.messages import is_expected, tell_error

if TYPE_CHECKING:  # imports numpy, and Hydra makes the callback for `--help` too
    from kvbench.runs.results import Results

log = logging.getLogger(__name__)

UNTOLD = {
    "missing": "was not started; the same command goes on with it",
    "started": "did not come to its end: its process was killed, or still runs",
}
"""What is told of jobs that could not say themselves what became of them."""


def describe_failure(error: Exception) -> str:
    """Print and return, in one line, why a job of a sweep failed; the log gets the traceback where it is our fault.

    Outside a sweep there is no other job to save: the program ends.
    """
    if is_expected(error):
        line = tell_error(error)
    elif HydraConfig.get().mode is RunMode.MULTIRUN:
        log.error("a job of the sweep broke", exc_info=error)
        line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    else:
        raise error
    if HydraConfig.get().mode is not RunMode.MULTIRUN:
        sys.exit(f"error: {line}")
    CONSOLE.print(f"error: {line}", style="red", highlight=False, markup=False, soft_wrap=True)
    return line


@contextmanager
def _ending_if_broken() -> Iterator[None]:
    """End the program where a callback breaks: Hydra would warn, and a sweep without its jobs' list seem to be well."""
    try:
        yield
    except Exception as error:
        if not is_expected(error):
            log.exception("the sweep broke")
        sys.exit(f"error: {tell_error(error)}")


class Summary(Callback):
    """After a sweep: one table of all jobs, a published one beside it, and a failing exit status if any job failed.

    Every job writes what became of it into the sweep's folder (`kvbench.cli.jobs`), in whatever process it runs: a
    launcher gives each a copy of this object.

    Attributes:
        running: the sweep that has begun and not been told the end of; its launcher may break.
        name: what the sweep is called whose job this process runs: the choice of `sweeps`, or its folder's name.
    """

    running: ClassVar["Summary | None"] = None
    name: ClassVar[str | None] = None

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._name: str | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: object) -> None:
        """Write down which jobs there will be."""
        with _ending_if_broken():
            self._config = config
            self._folder = open_folder(Path(config.runs_dir).expanduser(), list_jobs(config))
            self._name = OmegaConf.select(config, "hydra.runtime.choices.sweeps") or self._folder.name
            Summary.running = self

    def on_job_start(self, config: DictConfig, **kwargs: object) -> None:
        """Write that a job runs."""
        Summary.name = self._name
        self._write(config, "started")

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: object) -> None:
        """Write what a job left: its run folder, its calibrations, or why it failed."""
        Summary.name = None
        value = job_return._return_value
        if isinstance(value, str | BaseException):
            self._write(config, "failed", error=" ".join(str(value).split()))
        else:
            folder = str(value) if isinstance(value, Path) else None
            files = tuple(map(str, value)) if isinstance(value, list) else ()
            self._write(config, "finished", folder=folder, files=files)

    def on_multirun_end(self, config: DictConfig, **kwargs: object) -> None:
        """Print the tables."""
        with _ending_if_broken():
            self.show()

    def show(self) -> None:
        """Print the tables of what is there; the program ends with a failing status if a job failed or is missing."""
        from kvbench.report import (
            beside_published,  # imports torch, and Hydra makes this callback for `--help` too
        )
        from kvbench.report.collect import read_runs, read_with_bounds, read_with_references
        from kvbench.report.many_runs import show_runs
        from kvbench.report.published import find

        assert self._folder is not None
        Summary.running = None
        config, entries = self._config, read_entries(self._folder)
        folders = list(dict.fromkeys(Path(entry.folder) for entry in entries if entry.folder))
        failures = [
            (" ".join(entry.overrides), entry.error or UNTOLD[entry.outcome])
            for entry in entries
            if entry.outcome != "finished"
        ]
        show_runs(CONSOLE, read_with_bounds(folders), failures)
        if config.published is not None:
            table, runs_dir = find(config.published), Path(config.runs_dir).expanduser()
            if table.figure == "stability":
                name, sinks = str(config.model.name), int(config.sinks)
                artifacts = [Path(file) for entry in entries for file in entry.files]
                beside_published.show_stability(CONSOLE, table, artifacts, sinks, name, runs_dir)
            else:
                beside_published.show_beside(CONSOLE, table, read_with_references(folders), runs_dir)
        self._send(read_runs(folders))
        if failures:
            sys.exit(1)

    def _send(self, runs: "Sequence[Results]") -> None:
        """Send the sweep where its runs were sent, if that was asked for."""
        if self._config.logger and runs:
            from kvbench.dashboard.page import write_dashboard

            assert self._folder is not None
            assert self._name is not None
            page = None
            if find_spec("jinja2") is not None:  # of an extra
                page = write_dashboard(Path(self._config.runs_dir).expanduser())
            instantiate(self._config.logger).send_sweep(self._folder, self._name, runs, page)

    def _write(
        self,
        config: DictConfig,
        outcome: Literal["started", "finished", "failed"],
        *,
        folder: str | None = None,
        files: tuple[str, ...] = (),
        error: str | None = None,
    ) -> None:
        if self._folder is None:  # one job by itself
            return
        job = config.hydra
        write_entry(
            self._folder, Entry(job.job.num, tuple(job.overrides.task), outcome, folder, files, error)
        )
