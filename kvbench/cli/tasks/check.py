"""`task=check`: what a run would need, checked without loading weights or generating."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from omegaconf import DictConfig
from rich.markup import escape
from rich.table import Table

from kvbench.cli.config.instantiate import instantiate
from kvbench.cli.console import CONSOLE
from kvbench.cli.tasks.job import make_job
from kvbench.cli.tasks.plan import plan_cache
from kvbench.core.config import ConfigError, UserError
from kvbench.core.files import count_free_bytes
from kvbench.core.settings import Settings
from kvbench.engine.memory import MIB
from kvbench.eval.files.weights import find_wrong
from kvbench.eval.protocol.base import find_missing
from kvbench.models.base import Model
from kvbench.models.files.hub import Listing, format_bytes
from kvbench.models.files.weights import survey
from kvbench.report.collect import read_runs
from kvbench.runs.check import check_job
from kvbench.runs.job import Job
from kvbench.runs.record.results import FILE, Results
from kvbench.runs.score.tracker import check_logger

COLOURS = {"ok": "green", "note": "yellow", "error": "red"}
"""Colour of each state."""


class Finding(NamedTuple):
    """Result of one check; with state `error` the run cannot start, with `note` it can."""

    subject: str
    state: Literal["ok", "note", "error"]
    text: str


def show_findings(findings: Sequence[Finding]) -> None:
    """Print a table of findings.

    Raises:
        ConfigError: the state of a finding is `error`.
    """
    table = Table(box=None, show_header=False)
    for finding in findings:
        table.add_row(finding.subject, f"[{COLOURS[finding.state]}]{finding.state}[/]", escape(finding.text))
    CONSOLE.print(table)
    if errors := [finding.subject for finding in findings if finding.state == "error"]:
        raise ConfigError(f"task=check: the run cannot start: {', '.join(errors)}")


def check(cfg: DictConfig, settings: Settings) -> None:
    """Do `task=check`: print what the run needs; no weights are loaded and nothing is generated."""
    job = make_job(cfg, settings)

    def describe_memory() -> str:
        longest = None if job.longest is None else job.longest.tokens
        peaks = plan_cache(settings, job.model, instantiate(cfg.method), longest).at_once
        if not peaks:
            raise ConfigError("what a cache in few bits needs is measured by its run")
        cache, full = peaks["method"] / MIB, peaks["full"] / MIB
        weights = job.model.parameters * job.model.compute_dtype(settings.device).itemsize / MIB
        caches = f"cache at most {cache:.1f} MiB at batch {settings.batch_size} (full cache {full:.1f})"
        return f"{caches}, weights {weights:.1f} MiB"

    show_findings(list(check_run(job, describe_memory)))


def check_run(job: Job, describe_memory: Callable[[], str]) -> Iterator[Finding]:
    """Yield the findings of a run; `describe_memory` raises ConfigError if the memory of the cache depends on data."""
    yield _try("method, prompts", lambda: _describe_job(job))
    yield _try("weights", lambda: _find_weights(job.model))
    if job.logger is not None:
        yield _try("logger", lambda: _describe_logger(job.logger))
    missing = {name: find_missing(evaluator) for name, evaluator in job.evaluators.items()}
    for name, reasons in missing.items():
        if reasons:
            required = name in job.settings.require
            yield Finding(f"eval={name}", "error" if required else "note", f"skipped: {'; '.join(reasons)}")
    for name, evaluator in job.evaluators.items():
        for line in find_wrong(evaluator.weights):
            yield Finding(f"eval={name}", "error", line)
    complete = [name for name, reasons in missing.items() if not reasons]
    yield Finding("metrics", "ok" if complete else "note", ", ".join(complete) or "none")
    memory = _try("memory", describe_memory)
    yield memory if memory.state == "ok" else memory._replace(state="note")
    yield from _estimate(job)


def _try(subject: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, "ok", check())
    except (UserError, ValueError) as error:
        return Finding(subject, "error", " ".join(str(error).split()))


def _describe_job(job: Job) -> str:
    check_job(job)
    budget = job.allowance.requested
    tokens = f"{float(budget.capacity):g} tokens"
    return f"{job.method_name} at budget={job.settings.budget} ({tokens}), {len(job.prompts)} prompts"


def _describe_logger(logger: object) -> str:
    check_logger(logger)
    return type(logger).__name__


def _find_weights(model: Model) -> str:
    """Return the origin of the weights and the size of the download; raise WeightsError that names what is missing."""
    sources = model.list_sources()
    places = zip(sources, survey(sources.values()), strict=True)
    return ", ".join(f"{part}: {_describe_weights(place)}" for part, place in places) or "random numbers"


def _describe_weights(place: Path | Listing) -> str:
    if isinstance(place, Path):
        return place.name
    return f"{place.part.repo} from the Hub ({format_bytes(sum(place.missing.values()))} to download)"


def _estimate(job: Job) -> Iterator[Finding]:
    """Yield time and disk space, estimated from finished runs of the model on the device, of the method if possible."""
    folder = job.settings.runs_dir / job.model.name
    known = [
        run
        for run in read_runs(path.parent for path in sorted(folder.glob(f"*/{FILE}")))
        if run.latency.device == job.settings.device
    ]
    alike = [run for run in known if run.method == job.method_name] or known
    free = count_free_bytes(folder)
    if not alike:
        yield Finding("time, disk", "note", f"no finished run of {job.model.name} in {job.settings.runs_dir}")
        return
    count = len(job.prompts) * (1 if job.is_reference else 2)
    seconds = median(run.latency.seconds_per_image for run in alike) * count
    yield Finding("time", "ok", f"about {_format_time(seconds)} for {count} samples, reference included")
    needed = count * median(_measure(folder / run.run, run) for run in alike)
    detail = f"about {needed / MIB:.1f} MiB of {free / MIB:.0f} that are free"
    yield Finding("disk", "ok" if needed < free else "error", detail)


def _measure(folder: Path, run: Results) -> float:
    """Return the bytes of a run's folder per sample."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / run.n


def _format_time(seconds: float) -> str:
    """Format a time in its largest unit.

    >>> _format_time(5400)
    '1.5 h'
    """
    size, unit = next(one for one in ((3600, "h"), (60, "min"), (0, "s")) if seconds >= one[0])
    return f"{seconds / max(size, 1):.1f} {unit}"
