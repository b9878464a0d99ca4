"""Memory columns of tables: tokens, bytes and the total memory of the cache."""

from collections.abc import Mapping, Sequence

from kvbench.core.storage import CODE_DTYPES
from kvbench.engine.memory import MIB
from kvbench.report.seeds import find_members, name_count
from kvbench.report.tables import Cell
from kvbench.runs.record.results import WELL_USED, Memory, Results

IN_FLIGHT_COLUMN = "cache + in flight %"
"""Column of the cache's peak bytes: stored, in flight, being rebuilt and held by the method."""
READ_COLUMN = "MiB read"
"""Column of the bytes that attention reads from the cache for an image or a token."""
TIME_COLUMNS = ("s/image", "s/text", "s/sample")
"""Headings that `name_time` returns."""


def name_percent(memory: Memory) -> str:
    """Return a budget as a percentage of the full cache or of its bytes."""
    unit = "'s bytes" if memory.budget_unit == "bytes" else ""
    return f"{100 * memory.budget:.3g} % of the full cache{unit}"


def uses_bytes(runs: Sequence[Results]) -> bool:
    """Return whether runs must be compared in bytes: a budget counts bytes, or values have fewer than 16 bits."""
    return any(run.memory.budget_unit == "bytes" or run.setting("cache_dtype") in CODE_DTYPES for run in runs)


def compare_total_bytes(run: Results, runs: Mapping[str, Results]) -> float | None:
    """Return the peak bytes of a run's cache per prompt, as a share of its reference's; None without the reference.

    `runs` has the row of each run by the name of its folder.
    """
    reference = run if run.reference is None else runs.get(run.reference)
    if reference is None:
        return None
    held, full = (side.memory.at_once_bytes / side.memory.batch for side in (run, reference))
    return held / full


def list_costs(runs: Sequence[Results]) -> list[dict[str, Cell]]:
    """Return the cells of memory and time of each run of a table."""
    known, in_bytes = find_members(runs), uses_bytes(runs)
    totals = [compare_total_bytes(run, known) for run in runs]
    in_flight = any(total is not None for total in totals)
    on_gpu = any(run.memory.gpu_peak_bytes for run in runs)
    reads = any(run.memory.bytes_read is not None for run in runs)
    rows, time_column = [], name_time(runs)
    for run, total in zip(runs, totals, strict=True):
        memory = run.memory
        cells: dict[str, Cell] = {
            "peak tokens": str(memory.peak_tokens),
            "peak %": f"{100 * memory.peak:.2f}",
        }
        if in_bytes:
            cells["bytes %"] = _write_percent(memory.byte_peak)
        shares = {"last / B": memory.last_share, "least / B": memory.least_share}
        cells |= {name: f"{share:.3f}{mark_unused(memory, share)}" for name, share in shares.items()}
        if in_flight:
            cells[IN_FLIGHT_COLUMN] = _write_percent(total)
        if on_gpu:
            cells["GPU MiB"] = f"{memory.gpu_peak_bytes / MIB:.0f}" if memory.gpu_peak_bytes else "-"
        if reads:
            cells[READ_COLUMN] = "-" if memory.bytes_read is None else f"{memory.bytes_read / MIB:.4g}"
        times = {
            "state MiB": f"{memory.state_bytes / MIB:.2f}",
            time_column: f"{run.latency.seconds_per_image:.3f}{run.latency.mark}",
        }
        rows.append(cells | times | {"n": name_count(run)})
    return rows


def name_time(runs: Sequence[Results]) -> str:
    """Return the heading of the time that a sample takes: `s/image`, `s/text`, or `s/sample` for both kinds."""
    kinds = {"image" if run.latency.tokens_per_second is None else "text" for run in runs}
    return f"s/{kinds.pop() if len(kinds) == 1 else 'sample'}"


def _write_percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


def write_in_use(memory: Memory, share: float) -> str:
    """Return a share of the budget as the terminal shows it, `100.0 %` or `80.8 %!` (see `mark_unused`)."""
    return f"{100 * share:.1f} %{mark_unused(memory, share)}"


def mark_unused(memory: Memory, share: float = 0.0) -> str:
    """Return "!" if a share of the budget is below `WELL_USED` although tokens for it exist, else an empty string."""
    return "!" if share < WELL_USED and not memory.well_used else ""


def describe_unused(runs: Sequence[Results]) -> str:
    """Return a sentence on the mark of `mark_unused`; empty where no run has it."""
    marked = any(mark_unused(run.memory) for run in runs)
    return f"!: less than {100 * WELL_USED:g} % of the budget in use after some segment." * marked
