"""Memory columns of tables: budgets in their unit, bytes beside tokens, and total memory."""

from collections.abc import Mapping, Sequence

from kvbench.core.storage import CODE_DTYPES
from kvbench.engine.memory import MIB
from kvbench.report.tables import Cell
from kvbench.runs.record.results import WELL_USED, Memory, Results

AT_ONCE = "cache + in flight %"
"""Column of all that the cache needed at once: stored, in flight, rebuilt and kept by the method."""


def name_percent(memory: Memory) -> str:
    """Write a budget as per cent of what it counts."""
    return f"{100 * memory.budget:.3g} % of the full cache" + (
        "'s bytes" if memory.budget_unit == "bytes" else ""
    )


def uses_bytes(runs: Sequence[Results]) -> bool:
    """Return whether tokens alone do not compare runs: a budget counts bytes, or numbers have fewer than 16 bits."""
    return any(run.memory.budget_unit == "bytes" or run.setting("cache_dtype") in CODE_DTYPES for run in runs)


def compare_at_once(run: Results, runs: Mapping[str, Results]) -> float | None:
    """Return what a run's cache needed at once, per prompt, as a share of what its reference's did.

    Args:
        run: a finished one.
        runs: by name, its reference among them if it is known.
    """
    reference = run if run.reference is None else runs.get(run.reference)
    if reference is None:
        return None
    mine, full = (one.memory.at_once_bytes / one.memory.batch for one in (run, reference))
    return mine / full


def list_costs(run: Results, runs: Sequence[Results]) -> dict[str, Cell]:
    """Return the cells that say what a run cost, as one of the rows of several runs."""
    memory, known = run.memory, {one.run: one for one in runs}
    cells: dict[str, Cell] = {"peak tokens": str(memory.peak_tokens), "peak %": f"{100 * memory.peak:.2f}"}
    if uses_bytes(runs):
        cells["bytes %"] = _write_percent(memory.byte_peak)
    cells |= {"last / B": _mark_share(memory.last_share), "least / B": _mark_share(memory.least_share)}
    if any(compare_at_once(one, known) is not None for one in runs):
        cells[AT_ONCE] = _write_percent(compare_at_once(run, known))
    if any(one.memory.gpu_peak_bytes for one in runs):
        cells["GPU MiB"] = f"{memory.gpu_peak_bytes / MIB:.0f}" if memory.gpu_peak_bytes else "-"
    return cells | {
        "state MiB": f"{memory.state_bytes / MIB:.2f}",
        "s/image": f"{run.latency.seconds_per_image:.3f}",
        "n": str(run.n),
    }


def _write_percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


def _mark_share(share: float) -> str:
    """Write a share of the budget; what leaves more than 3 % of it unused has an exclamation mark."""
    return f"{share:.3f}{'!' if share < WELL_USED else ''}"
