"""One run: memory, time and every metric with its interval, or why it was not computed."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvbench.engine.memory import MIB
from kvbench.eval.protocol.scores import Metric
from kvbench.report.tables import format_name, format_number
from kvbench.runs.record.results import Memory, Outcome, Results


def show_run(console: Console, run: Results) -> None:
    """Print a run; metrics without a value stand below the table, those with the same reason together."""
    table = Table(title=f"{run.model_label}, {run.run}   n = {run.n}", title_justify="left")
    for name in ("", "value", "95 % interval", "n", "note"):
        table.add_column(name, justify="right" if name in ("value", "n") else "left")
    for cells in _cost_rows(run):
        table.add_row(*cells)
    table.add_section()
    missing: dict[str, list[str]] = {}
    for name, metric in run.metrics.items():
        if metric.value is None and metric.status != "ok":
            missing.setdefault(f"{metric.status}: {metric.reason}", []).append(name)
        else:
            table.add_row(*map(escape, _metric_row(name, metric)))
    console.print(table)
    for reason, names in missing.items():
        line = f"{', '.join(names)} {reason}"
        console.print(line, markup=False, highlight=False, style="dim", soft_wrap=True)


def show_outcome(console: Console, outcome: Outcome) -> Path:
    """Print a finished run and where it is, which is also returned."""
    assert outcome.results is not None
    show_run(console, outcome.results)
    verb = "found finished" if outcome.reused else "finished"
    console.print(f"{verb}: {outcome.folder}", highlight=False, soft_wrap=True)
    return outcome.folder


def _cost_rows(run: Results) -> list[tuple[str, str, str, str, str]]:
    memory, latency, drawn = run.memory, run.latency, run.latency.tokens_per_second
    rebuilt, flying = memory.rebuild_bytes / MIB, memory.transient_bytes / MIB
    kept = f", {memory.state_bytes / MIB:.2f} of scores and keys beside" if memory.state_bytes else ""
    return [
        (
            "cache, tokens per sequence",
            str(memory.peak_tokens),
            "",
            "",
            _describe_tokens(memory),
        ),
        ("cache, bytes per sequence", str(memory.sequence_bytes), "", "", _describe_bytes(memory)),
        (
            "cache, MiB stored",
            f"{memory.peak_bytes / MIB:.2f}",
            "",
            "",
            f"batch {memory.batch}; {rebuilt:.2f} while a layer is rebuilt, {flying:.2f} more in flight{kept}",
        ),
        (
            f"seconds per {'image' if drawn is None else 'text'}",
            f"{latency.seconds_per_image:.4f}",
            "",
            "",
            f"{latency.device}, batch {latency.batch}"
            + ("" if drawn is None else f", {drawn:.1f} tokens per second"),
        ),
    ]


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
    last, least = 100 * memory.last_share, 100 * memory.least_share
    return f"{used}; of the budget {last:.1f} % at the last scale, {least:.1f} % at least"


def _metric_row(name: str, metric: Metric) -> tuple[str, str, str, str, str]:
    value, interval = "-", ""
    if metric.value is not None:
        value = f"{format_number(metric.value, metric.digits)} {metric.unit}".rstrip()
        interval = " .. ".join(format_number(end, metric.digits) for end in metric.interval or ())
    return format_name(name, metric), value, interval, str(metric.n), metric.reason or ""
