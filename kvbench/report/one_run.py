"""One run: memory, time and metrics with their intervals, or why they were not computed."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvbench.engine.memory import MIB
from kvbench.eval.protocol.scores import Metric
from kvbench.report.tables import format_name, format_number
from kvbench.runs.record.results import Memory, Outcome, Results

REMEDY = ". Get it with: "
"""Separator between a reason and its remedy (`kvbench.eval.protocol.base.find_missing`)."""
UNITS = {"1e-3": "x 10⁻³"}
"""Units as the terminal shows them."""
SHOWN = 2
"""Metrics of one evaluator that the short form shows."""
OVERLOADED = 1.5
"""Processes ready to run per processor beyond which times are marked."""


def show_run(console: Console, run: Results, *, verbose: bool = True) -> None:
    """Print a run; metrics without a value stand below the table, those with the same remedy together.

    Args:
        console: where.
        run: what was measured.
        verbose: print every metric, in place of two of each evaluator and no groups.
    """
    budget = run.config.get("budget")
    typed = "" if budget is None else f"   budget {budget}"
    table = Table(
        title=f"{run.model_label}, {run.run}{typed}   n = {run.n}", title_justify="left", box=SIMPLE_HEAD
    )
    for name in ("", "value", "95 % interval", "n", "note"):
        table.add_column(name, justify="right" if name in ("value", "n") else "left")
    for cells in _cost_rows(run, verbose=verbose):
        table.add_row(*cells)
    found = {name: metric for name, metric in run.metrics.items() if _has_value(metric)}
    shown = found if verbose else dict(_choose_main(found))
    for name, metric in shown.items():
        table.add_row(*map(escape, _metric_row(name, metric)))
    console.print(table)
    if len(shown) < len(found):
        console.print(f"{len(found) - len(shown)} more metrics: add -v", style="dim", highlight=False)
    for line in _describe_missing(run.metrics):
        console.print(line, markup=False, highlight=False, style="dim", soft_wrap=True)


def show_outcome(console: Console, outcome: Outcome, *, verbose: bool = True) -> Path:
    """Print a finished run and where it is, which is also returned; for `verbose` see `show_run`."""
    assert outcome.results is not None
    show_run(console, outcome.results, verbose=verbose)
    verb = "found finished" if outcome.reused else "finished"
    console.print(f"{verb}: {outcome.folder}", highlight=False, soft_wrap=True)
    return outcome.folder


def _has_value(metric: Metric) -> bool:
    return metric.value is not None or metric.status == "ok"


def _choose_main(metrics: Mapping[str, Metric]) -> Iterator[tuple[str, Metric]]:
    """Yield the first metrics of every evaluator that are no detail."""
    seen: dict[str, int] = {}
    for name, metric in metrics.items():
        seen[metric.evaluator] = seen.get(metric.evaluator, 0) + (not metric.detail)
        if not metric.detail and seen[metric.evaluator] <= SHOWN:
            yield name, metric


def _describe_missing(metrics: Mapping[str, Metric]) -> Iterator[str]:
    """Yield one line for each remedy of metrics that have no value, and for each reason without a remedy."""
    lacking: dict[str, dict[str, list[str]]] = {}
    for name, metric in metrics.items():
        if not _has_value(metric):
            reason, _, remedy = f"{metric.status}: {metric.reason}".partition(REMEDY)
            lacking.setdefault(remedy or reason, {}).setdefault(reason, []).append(name)
    for remedy, reasons in lacking.items():
        line = ", ".join(f"{', '.join(names)} {reason}" for reason, names in reasons.items())
        yield line if remedy in reasons else f"{line}{REMEDY}{remedy}"


def _cost_rows(run: Results, *, verbose: bool) -> Iterator[tuple[str, str, str, str, str]]:
    memory, latency, speed = run.memory, run.latency, run.latency.tokens_per_second
    rebuilt, flying = memory.rebuild_bytes / MIB, memory.transient_bytes / MIB
    kept = f", {memory.state_bytes / MIB:.2f} of scores and keys beside" if memory.state_bytes else ""
    yield "tokens/sequence", str(memory.peak_tokens), "", "", _describe_tokens(memory)
    yield "bytes/sequence", str(memory.sequence_bytes), "", "", _describe_bytes(memory)
    if verbose:
        yield (
            "MiB stored",
            f"{memory.peak_bytes / MIB:.2f}",
            "",
            "",
            f"batch {memory.batch}; {rebuilt:.2f} while a layer is rebuilt, {flying:.2f} more in flight{kept}",
        )
    notes = [latency.device, f"batch {latency.batch}"]
    if speed is not None:
        notes.append(f"{speed:.1f} tokens/s")
    if busy := _describe_load(run):
        notes.append(busy)
    unit = "s/image" if speed is None else "s/text"
    yield unit, f"{latency.seconds_per_image:.4f}", "", "", ", ".join(notes)


def _describe_load(run: Results) -> str:
    """Say that other processes took the processors when the run began; nothing if they did not or it is not known."""
    known = run.provenance or {}
    load, processors = known.get("load"), known.get("processors")
    if not (isinstance(load, float) and isinstance(processors, int) and load > OVERLOADED * processors):
        return ""
    return f"measured on a busy machine (load {load:.1f} of {processors} processors)"


def _describe_tokens(memory: Memory) -> str:
    """Say how many tokens were allowed and used; of a budget in bytes, how many these came to."""
    if memory.budget_unit == "bytes":
        share = f"{100 * memory.peak:.2f} % of {memory.full_tokens}"
        return f"at least {memory.budget_tokens:g} fit the budget ({share} held at the peak)"
    return f"budget {memory.budget_tokens:g} of {memory.full_tokens} ({_describe_use(memory, memory.peak)})"


def _describe_bytes(memory: Memory) -> str:
    """Say which share of the full cache in 16 bits was held; of a budget in bytes, how many were allowed and used."""
    share, full = memory.byte_peak, memory.full_sequence_bytes
    if memory.budget_bytes is None:
        return f"{100 * share:.2f} % of the full cache in 16 bits ({full})"
    return f"budget {memory.budget_bytes:.10g} of {full} in 16 bits ({_describe_use(memory, share)})"


def _describe_use(memory: Memory, peak: float) -> str:
    broken = ", above the budget: measured, not promised" if memory.exceeded else ""
    used = f"{100 * peak:.2f} % used at the peak{broken}"
    last, smallest = 100 * memory.last_share, 100 * memory.least_share
    return f"{used}; of the budget {last:.1f} % at the last scale, {smallest:.1f} % at least"


def _metric_row(name: str, metric: Metric) -> tuple[str, str, str, str, str]:
    value, interval = "-", ""
    if metric.value is not None:
        value = f"{format_number(metric.value, metric.digits)} {UNITS.get(metric.unit, metric.unit)}".rstrip()
        interval = " .. ".join(format_number(end, metric.digits) for end in metric.interval or ())
    return format_name(name, metric), value, interval, str(metric.n), metric.reason or ""
