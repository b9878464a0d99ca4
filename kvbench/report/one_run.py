"""Table of one run: memory, time and metrics with their intervals, or why metrics are missing."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvbench.engine.memory import MIB
from kvbench.eval.protocol.scores import Metric
from kvbench.report.answers import show_answers
from kvbench.report.code_notes import name_origin
from kvbench.report.drifts import find_worst_positions
from kvbench.report.full_scores import describe_failed, write_full
from kvbench.report.memory import describe_unused, name_time, write_in_use
from kvbench.report.tables import Style, format_cell, format_name, format_number, print_line
from kvbench.runs.record.origins import list_origins
from kvbench.runs.record.results import Memory, Outcome, Results

REMEDY_SEPARATOR = ". Get it with: "
"""Separator between a reason and its remedy (`kvbench.eval.protocol.base.find_missing`)."""
OTHER_KIND = "it scores "
"""Beginning of the reason why a metric of texts skips images (`kvbench.eval.protocol.base._find_obstacles`)."""
UNITS = {"1e-3": "x 10⁻³"}
"""Units as shown on the terminal."""
WORST_POSITIONS = 8
"""Number of tokens with the largest KL that are shown of a forced-decoding run."""
SCORE_WIDTH = 26
"""Width of `psnr 29.71 [27.45, 32.49]`, to which other metrics in the line of a run are padded."""


def show_run(console: Console, run: Results, *, verbose: bool = True) -> None:
    """Print a run; metrics without a value are listed below the table, grouped by remedy.

    `verbose` adds details of metrics, more costs, and the reasons of metrics that do not apply to the run.
    """
    table = Table(title=f"{run.model_label}, {run.run}   n = {run.n}", title_justify="left", box=SIMPLE_HEAD)
    for name in ("", "value", "95 % interval", "note"):
        table.add_column(name, justify="right" if name == "value" else "left")
    for cells in _cost_rows(run, verbose=verbose):
        table.add_row(*cells)
    metrics = {name: metric for name, metric in run.metrics.items() if _has_value(metric)}
    shown = {name: metric for name, metric in metrics.items() if verbose or not metric.detail}
    for name, metric in shown.items():
        table.add_row(*map(escape, _metric_row(run, name, metric)))
    console.print(table)
    for note in filter(None, (describe_unused([run]), describe_failed([run]))):
        print_line(console, note, "")
    if hidden := len(metrics) - len(shown):
        print_line(console, f"{hidden} more metric{'s' * (hidden > 1)}: add -v")
    origins = list_origins(run.provenance)
    for number, origin in enumerate(origins if len(origins) > 1 else (), 1):
        print_line(console, f"made with {number} of {len(origins)}: {name_origin(origin)}")
    applicable = {
        name: metric
        for name, metric in run.metrics.items()
        if verbose or (_applies(run, metric) and not metric.detail)
    }
    for line in _describe_missing(applicable):
        print_line(console, line)


def describe_run(run: Results, room: int) -> str:
    """Return the first metric, least budget share and time of a run, as many as fit into `room` characters.

    The metric has its interval if that fits.
    """
    style: Style = "range" if room >= SCORE_WIDTH else "value"
    score = "-"
    for name, metric in run.metrics.items():
        if metric.value is not None or (metric.needs_reference and run.reference is None):
            score = "reference" if metric.value is None else f"{name} {format_cell(metric, style)}"
            break
    time = f"{run.latency.seconds_per_image:.3f}{run.latency.mark} {name_time([run])}"
    line = score.ljust(min(SCORE_WIDTH, room))
    for part in (f"  in use {write_in_use(run.memory, run.memory.least_share):>7}", f"  {time}"):
        if len(line + part) > room:
            break
        line += part
    return line.rstrip()


def show_outcome(console: Console, outcome: Outcome, *, verbose: bool = True) -> Path:
    """Print a finished run and its folder; return the folder.

    For `verbose` see `show_run`; with it, the tokens with the largest KL of forced decoding are printed too.
    """
    assert outcome.results is not None
    show_run(console, outcome.results, verbose=verbose)
    show_answers(console, outcome.folder, outcome.results)
    if verbose:
        _show_positions(console, outcome.folder)
    verb = "found finished" if outcome.reused else "finished"
    console.print(f"{verb}: {outcome.folder}", highlight=False, soft_wrap=True)
    return outcome.folder


def _show_positions(console: Console, folder: Path) -> None:
    """Print the tokens with the largest KL of a forced-decoding run; nothing for other runs or damaged files."""
    try:
        positions = find_worst_positions(folder, WORST_POSITIONS)
    except ValueError:
        return
    if not positions:
        return
    title = "largest KL(full || method): the token in brackets after the text before it"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in ("text", "token", "KL", "", "full cache", "method"):
        table.add_column(name, justify="right" if name in ("text", "token", "KL") else "left")
    for position in positions:
        shown = [_escape_token(part) for part in (position.before, position.token)]
        texts = (
            f"{shown[0]}[{shown[1]}]",
            *map(_escape_token, (position.likeliest_full, position.likeliest)),
        )
        cells = (str(position.sample), str(position.position + 1), f"{position.kl:.3f}")
        table.add_row(*map(escape, (*cells, *texts)))
    console.print(table)


def _escape_token(text: str) -> str:
    """Return a token's characters with visible line ends and tabs."""
    return text.replace("\n", "⏎").replace("\t", "⇥")


def _has_value(metric: Metric) -> bool:
    return metric.value is not None or metric.status == "ok"


def _applies(run: Results, metric: Metric) -> bool:
    """Return whether a metric is for the run's kind of samples, and has the reference that it needs."""
    lacks_reference = metric.needs_reference and run.reference is None
    return not (metric.status == "skipped" and (lacks_reference or str(metric.reason).startswith(OTHER_KIND)))


def _describe_missing(metrics: Mapping[str, Metric]) -> Iterator[str]:
    """Yield a line for each remedy of metrics without a value, and for each reason without a remedy."""
    missing: dict[str, dict[str, list[str]]] = {}
    for name, metric in metrics.items():
        if not _has_value(metric):
            reason, _, remedy = f"{metric.status}: {metric.reason}".partition(REMEDY_SEPARATOR)
            missing.setdefault(remedy or reason, {}).setdefault(reason, []).append(name)
    for remedy, reasons in missing.items():
        line = ", ".join(f"{', '.join(names)} {reason}" for reason, names in reasons.items())
        yield line if remedy in reasons else f"{line}{REMEDY_SEPARATOR}{remedy}"


def _cost_rows(run: Results, *, verbose: bool) -> Iterator[tuple[str, str, str, str]]:
    memory, latency, speed = run.memory, run.latency, run.latency.tokens_per_second
    above = ", above the budget, which this method does not guarantee" if memory.exceeded else ""
    end = ", where there are no more tokens" if memory.lacks_tokens else ""
    yield "budget", f"{100 * memory.budget:.4g} %", "", _describe_budget(memory)
    yield "peak", f"{100 * memory.peak:.2f} %", "", f"{memory.peak_tokens} tokens{above}"
    least, last = (write_in_use(memory, share) for share in (memory.least_share, memory.last_share))
    in_use = "of the budget" + f" at least; {last} at the end{end}" * (least != last)
    yield "in use", least, "", in_use
    yield "bytes", str(memory.sequence_bytes), "", _describe_bytes(run)
    if verbose:
        rebuilt, flying = memory.rebuild_bytes / MIB, memory.transient_bytes / MIB
        state = f", {memory.state_bytes / MIB:.2f} of method state" if memory.state_bytes else ""
        note = f"batch {memory.batch}; {rebuilt:.2f} during a layer's rebuild, {flying:.2f} more in flight{state}"
        yield "MiB stored", f"{memory.peak_bytes / MIB:.2f}", "", note
        if memory.bytes_read is not None:
            each = "an image" if speed is None else "a token"
            note = f"from the cache by attention for {each}: all steps and sequences"
            yield "MiB read", f"{memory.bytes_read / MIB:.4g}", "", note
    notes = [latency.device, f"batch {latency.batch}"]
    if latency.others:
        total = latency.samples + latency.others
        notes.append(
            f"of {latency.samples} of {total} samples: others had another batch size, machine or load"
        )
    if speed is not None:
        notes.append(f"{speed:.1f} tokens/s")
    if latency.busy:
        notes.append("beside other work")
    yield name_time([run]), f"{latency.seconds_per_image:.4f}{latency.mark}", "", ", ".join(notes)


def _describe_budget(memory: Memory) -> str:
    """Return the allowed tokens; for a budget in bytes, these and the tokens guaranteed to fit."""
    if memory.budget_bytes is None:
        return f"{memory.budget_tokens:g} of {memory.full_tokens} tokens"
    allowed = f"{memory.budget_bytes:.10g} of {memory.full_sequence_bytes} bytes in 16 bits"
    return f"{allowed}, at least {memory.budget_tokens:g} tokens"


def _describe_bytes(run: Results) -> str:
    """Return the dtype and the share of the full cache in 16 bits, in which budgets count bytes.

    A dtype that the device or the method chose is named if it is float32.
    """
    memory, dtype = run.memory, run.stored
    if dtype == "auto":
        size, full = memory.sequence_bytes * memory.full_tokens, memory.full_sequence_bytes
        dtype = "float32" if size == 2 * full * memory.peak_tokens else ""
    stored = f"in {dtype}{', 4 bytes a number' * (dtype == 'float32')}: " if dtype else ""
    return f"{stored}{100 * memory.byte_peak:.2f} % of the full cache in 16 bits"


def _metric_row(run: Results, name: str, metric: Metric) -> tuple[str, str, str, str]:
    value, interval, full = "-", "", write_full(run, name)
    notes = [f"n = {metric.n}"] if metric.n != run.n else []
    notes += [metric.reason] if metric.reason else [] if full is None else [f"full cache: {full}"]
    if metric.value is not None:
        value = f"{format_number(metric.value, metric.digits)} {UNITS.get(metric.unit, metric.unit)}".rstrip()
        interval = " .. ".join(format_number(end, metric.digits) for end in metric.interval or ())
    return format_name(name, metric), value, interval, "; ".join(notes)
