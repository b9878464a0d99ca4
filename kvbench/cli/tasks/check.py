"""`task=check`: what a run would need, checked without loading weights or generating."""

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table

from kvbench.core.config import ConfigError, UserError
from kvbench.core.files import count_free_bytes
from kvbench.engine.memory import MIB
from kvbench.eval.protocol.base import find_missing
from kvbench.models.base import Model
from kvbench.models.files.hub import Listing, format_bytes
from kvbench.models.files.weights import survey
from kvbench.report.collect import read_runs
from kvbench.runs.job import Job
from kvbench.runs.record.results import FILE, Results

MARKS = {"ok": "green", "note": "yellow", "error": "red"}
"""Colours of what was found."""


class Finding(NamedTuple):
    """One thing that was checked; `error` stands against the run, `note` does not."""

    subject: str
    state: Literal["ok", "note", "error"]
    text: str


def show_findings(console: Console, findings: list[Finding]) -> None:
    """Print what was found.

    Raises:
        ConfigError: something stands against the run.
    """
    table = Table(box=None, show_header=False)
    for finding in findings:
        colour = MARKS[finding.state]
        table.add_row(finding.subject, f"[{colour}]{finding.state}[/]", finding.text)
    console.print(table)
    if wrong := [finding.subject for finding in findings if finding.state == "error"]:
        raise ConfigError(f"task=check: the run cannot start: {', '.join(wrong)}")


def check_run(job: Job, list_memory: Callable[[], str]) -> Iterator[Finding]:
    """Yield what a run needs: settings and prompts, weights, metrics, memory, disk and time.

    Args:
        job: what would run.
        list_memory: returns the memory of the cache in words, or raises ConfigError where it depends on data.
    """
    yield _try("method, prompts", lambda: _describe_job(job))
    yield _try("weights", lambda: _find_weights(job.model))
    lacking = {name: find_missing(evaluator) for name, evaluator in job.evaluators.items()}
    for name, reasons in lacking.items():
        if reasons:
            required = name in job.settings.require
            yield Finding(f"eval={name}", "error" if required else "note", f"skipped: {'; '.join(reasons)}")
    whole = [name for name, reasons in lacking.items() if not reasons]
    yield Finding("metrics", "ok" if whole else "note", ", ".join(whole) or "none")
    memory = _try("memory", list_memory)
    yield memory if memory.state == "ok" else memory._replace(state="note")
    yield from _estimate(job)


def _try(subject: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, "ok", check())
    except (UserError, ValueError) as error:
        return Finding(subject, "error", " ".join(str(error).split()))


def _describe_job(job: Job) -> str:
    job.check()
    budget = job.allowance.requested
    tokens = f"{float(budget.capacity):g} tokens"
    return f"{job.method_name} at budget={job.settings.budget} ({tokens}), {len(job.prompts)} prompts"


def _find_weights(model: Model) -> str:
    """Return where the weights come from and how much is to be downloaded; nothing is.

    Raises:
        WeightsError: naming all that is missing.
    """
    sources = model.list_sources()
    found = zip(sources, survey(sources.values()), strict=True)
    return ", ".join(f"{part}: {_describe_weights(one)}" for part, one in found) or "random numbers"


def _describe_weights(found: Path | Listing) -> str:
    if isinstance(found, Path):
        return found.name
    return f"{found.part.repo} from the Hub ({format_bytes(sum(found.missing.values()))} to download)"


def _estimate(job: Job) -> Iterator[Finding]:
    """Yield time and disk space by finished runs of the same model and device, those of the method if there are any."""
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
    count = len(job.prompts) * (1 if job.reference else 2)
    seconds = median(run.latency.seconds_per_image for run in alike) * count
    yield Finding(
        "time", "ok", f"about {_format_time(seconds)} for {count} samples with those of the reference"
    )
    needed = count * median(_measure(folder / run.run, run) for run in alike)
    detail = f"about {needed / MIB:.1f} MiB of {free / MIB:.0f} that are free"
    yield Finding("disk", "ok" if needed < free else "error", detail)


def _measure(folder: Path, run: Results) -> float:
    """Return the bytes that each sample of a run takes, its share of all other files included."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / run.n


def _format_time(seconds: float) -> str:
    """Write a time in its largest unit.

    >>> _format_time(5400)
    '1.5 h'
    """
    size, unit = next(one for one in ((3600, "h"), (60, "min"), (0, "s")) if seconds >= one[0])
    return f"{seconds / max(size, 1):.1f} {unit}"
