"""Recorded segments under methods that read data: lengths of rows must be known beforehand."""

from kvbench.core.segments import ModelSpec
from kvbench.engine.schedule import StorageChange, add_error_context, plan_change, predict_row_lengths
from kvbench.engine.view import CacheView
from kvbench.kernels.layout import Layout
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.hook_results import WrongTensor


def can_record(spec: ModelSpec, method: Method) -> bool:
    """Return whether whole segments can be recorded: tokens come at once, and the host reads no value of a device.

    Args:
        spec: the model's shapes.
        method: a method prepared for that model.
    """
    if any(segment.causal for segment in spec.segments) or method.graph_obstacle is not None:
        return False
    return method.static or predict_row_lengths(spec, method) is not None


def plan_recorded_change(
    method: Method, view: CacheView, layout: Layout, *, recording: bool
) -> StorageChange:
    """Call a method's `keep` after a segment whose tokens came at once, and return the storage change.

    Args:
        method: a prepared method; its `capacity` gives the lengths of rows.
        view: one layer right after the segment.
        layout: layout of the layer's storage before the segment is stored.
        recording: whether work is being recorded, when the host must not read lengths; otherwise they are checked.

    Raises:
        WrongTensor: the length of a row differs from `capacity`.
    """
    capacity = method.capacity(view.layer, view.segment)
    assert capacity is not None
    by_head = capacity if isinstance(capacity, tuple) else (capacity,) * view.heads
    before = [count + view.segment.length for count in layout.counts]
    lengths = [*map(min, before, by_head * view.sequences)]
    change = plan_change(method, view, layout, counts=lengths if recording else None)
    with add_error_context(method, view):
        for row, (kept, expected) in enumerate(zip(change.layout.counts, lengths, strict=True)):
            if kept != expected:
                raise WrongTensor(
                    f"keep left {kept} slots in row {row} and capacity says {expected}; let capacity return None "
                    "where lengths depend on data"
                )
    return change
