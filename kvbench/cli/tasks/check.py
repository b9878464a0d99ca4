"""`task=check`: what a run would need, checked without loading weights or generating."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from omegaconf import DictConfig
from rich.markup import escape
from rich.table import Column, Table

from kvbench.cli.config.compose import compose_job, hydra_of_kvbench, read_settings
from kvbench.cli.console import CONSOLE
from kvbench.cli.tasks.expected import count_samples, expect_time, format_time
from kvbench.cli.tasks.job import make_job, make_method
from kvbench.cli.tasks.plan import plan_cache
from kvbench.core.config import ConfigError, UserError
from kvbench.core.files import count_free_bytes
from kvbench.core.settings import Settings
from kvbench.data.publication import check_packages
from kvbench.engine.memory import MIB
from kvbench.eval.files.weights import find_wrong
from kvbench.eval.protocol.base import find_missing
from kvbench.methods.shared.base import Method
from kvbench.models.base import Model
from kvbench.models.files.hub import format_bytes
from kvbench.models.files.weights import check_named, locate_or_list
from kvbench.report.collect import read_runs
from kvbench.runs.check import check_job
from kvbench.runs.job import Job
from kvbench.runs.record.results import FILE, Results
from kvbench.runs.score.tracker import check_logger

COLOURS = {"ok": "green", "note": "yellow", "error": "red"}
"""Colour of each state in the table of findings."""


class Finding(NamedTuple):
    """Result of one check; the run cannot start if the state is `error`."""

    subject: str
    state: Literal["ok", "note", "error"]
    text: str


def show_findings(findings: Sequence[Finding]) -> None:
    """Print a table of findings.

    Raises:
        ConfigError: the state of a finding is `error`.
    """
    table = Table("", "", Column(overflow="fold"), box=None, show_header=False)
    for finding in findings:
        table.add_row(finding.subject, f"[{COLOURS[finding.state]}]{finding.state}[/]", escape(finding.text))
    CONSOLE.print(table)
    if errors := dict.fromkeys(finding.subject for finding in findings if finding.state == "error"):
        raise ConfigError(f"task=check: the run cannot start: {', '.join(errors)}")


def check(cfg: DictConfig, settings: Settings) -> None:
    """Run `task=check`: print what the run needs; no weights are loaded and nothing is generated."""
    job = make_job(cfg, settings)
    show_findings(list(check_run(job, make_method(cfg.method, job.method_name))))


def check_jobs(jobs: Sequence[Sequence[str]]) -> None:
    """Check the jobs of a sweep as `task=check` does, each finding once, and print the time that all may take.

    Args:
        jobs: overrides of each job.

    Raises:
        ConfigError: a job cannot start.
    """
    found: dict[Finding, None] = {}
    sources: dict[str, None] = {}
    seconds, samples = 0.0, 0
    with hydra_of_kvbench():
        for words in jobs:
            cfg, _ = compose_job([*words])
            job = make_job(cfg, read_settings(cfg), keep_model=True)
            if (place := job.settings.sweep.pack) is not None:
                found[_try("sweep.pack", lambda: _describe_place(place))] = None
            findings = check_run(job, make_method(cfg.method, job.method_name))
            found |= dict.fromkeys(one for one in findings if one.subject not in ("time", "disk"))
            expected, count = expect_time(job, _find_alike(job)), count_samples(job)
            seconds, samples = seconds + count * expected.seconds, samples + count
            sources[expected.source] = None
    told = f"about {format_time(seconds)} for {samples} samples in {len(jobs)} jobs, scores not counted"
    show_findings([*found, Finding("time", "note", f"{told}, as {'; '.join(sources)}")])


def check_run(job: Job, method: Method) -> Iterator[Finding]:
    """Yield the findings of a run; `method` is a second object of its method, which the plan prepares."""
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
    memory = _try("memory", lambda: _describe_memory(job, method))
    yield memory if memory.state == "ok" else memory._replace(state="note")
    yield from _estimate(job)


def _try(subject: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, "ok", check())
    except (UserError, ValueError) as error:
        return Finding(subject, "error", " ".join(str(error).split()))


def _describe_job(job: Job) -> str:
    check_job(job)
    budget = job.budget
    tokens = f"{float(budget.capacity):g} tokens"
    return f"{job.method_name} at budget={job.settings.budget} ({tokens}), {len(job.prompts)} prompts"


def _describe_memory(job: Job, method: Method) -> str:
    """Return the memory of cache and weights; raise ConfigError if the cache's memory depends on data."""
    settings, longest = job.settings, None if job.longest is None else job.longest.tokens
    peaks = plan_cache(settings, job.model, method, longest).at_once
    if not peaks:
        raise ConfigError("the memory of low-bit storage is measured by its run")
    cache, full = peaks["method"] / MIB, peaks["full"] / MIB
    weights = job.model.parameters * job.model.compute_dtype(settings.device).itemsize / MIB
    caches = f"{job.method_name}: cache at most {cache:.1f} MiB at batch {settings.batch_size} (full cache {full:.1f})"
    return f"{caches}, weights {weights:.1f} MiB"


def _describe_place(place: str) -> str:
    """Return where a dataset will be written; raise ConfigError if its packages are not installed."""
    check_packages()
    return f"{place}, when all jobs are finished"


def _describe_logger(logger: object) -> str:
    check_logger(logger)
    return type(logger).__name__


def _find_weights(model: Model) -> str:
    """Return the origin of the weights and the size of the download; raise WeightsError that names what is missing."""
    sources, found = model.list_sources(), []
    for part, place in zip(sources, locate_or_list(sources.values()), strict=True):
        if isinstance(place, Path):
            found.append(f"{part}: {place.name}, sha256 {check_named(place)[:12]}")
        else:
            size = format_bytes(sum(place.missing.values()))
            found.append(f"{part}: {place.part.repo} from the Hub ({size} to download)")
    return ", ".join(found) or "random numbers"


def _estimate(job: Job) -> Iterator[Finding]:
    """Yield time and disk space, estimated from finished runs of the model on the device, of the method if possible."""
    alike, folder = _find_alike(job), job.settings.runs_dir / job.model.name
    expected, count = expect_time(job, alike), len(job.prompts) * (1 if job.is_reference else 2)
    told = f"about {format_time(expected.seconds * count)} for {count} samples, reference included"
    yield Finding("time", "note" if expected.scaled else "ok", f"{told}, as {expected.source}")
    if not alike:
        yield Finding("disk", "note", f"no finished run of {job.model.name} in {job.settings.runs_dir}")
        return
    free = count_free_bytes(folder)
    needed = count * median(_measure(folder / run.run, run) for run in alike)
    detail = f"about {needed / MIB:.1f} MiB of {free / MIB:.0f} that are free"
    yield Finding("disk", "ok" if needed < free else "error", detail)


def _find_alike(job: Job) -> list[Results]:
    """Return the finished runs of a job's model on its device, only runs of its method if there are any."""
    folder = job.settings.runs_dir / job.model.name
    known = [
        run
        for run in read_runs(path.parent for path in sorted(folder.glob(f"*/{FILE}")))
        if run.latency.device == job.settings.device
    ]
    return [run for run in known if run.method == job.method_name] or known


def _measure(folder: Path, run: Results) -> float:
    """Return the bytes of a run's folder per sample."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / run.n
