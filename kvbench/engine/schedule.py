"""Changes of a layer's storage after a segment: new layouts, and index tables that rebuild layers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.config import UserError
from kvbench.core.segments import ModelSpec, Segment
from kvbench.engine.arena import ring_slots
from kvbench.engine.layer import LayerInputs
from kvbench.engine.view import CacheView
from kvbench.kernels.compact import list_origins, source_table
from kvbench.kernels.layout import Layout, empty_layout, list_positions, pack_rows
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.hook_results import NotANumber, WrongTensor, require_tensor

Ints = NDArray[np.int64]


class Contents(NamedTuple):
    """New contents of kept slots.

    Attributes:
        keys: [capacity, D], in the new storage's flat slots; arbitrary in free slots.
        values: shaped like `keys`.
    """

    keys: Tensor
    values: Tensor


class LogSumExpDrift(NamedTuple):
    """Change of the observed queries' log-sum-exp by one eviction.

    Attributes:
        total: change in nats, a mean over the queries of each row, summed over the rows that dropped slots.
        rows: number of rows that dropped slots.
        before: log-sum-exp over all slots, in nats, a mean over queries and heads, by sequence.
        after: log-sum-exp over the kept slots, likewise.
    """

    total: float = 0.0
    rows: int = 0
    before: Sequence[float] = ()
    after: Sequence[float] = ()


class StorageChange(NamedTuple):
    """One layer's storage after a segment.

    Attributes:
        layout: layout of the new rows.
        source: origin of each new slot, int32 [capacity] (`kernels.compact.source_table`).
        appends: whether nothing is evicted and all rows are equally long and grow by the whole segment.
        state: float32 [rows, longest, ...], the method's values of the kept slots; None without `Uses.state`.
        contents: new contents; None unless the method replaced any.
        drift: change of the observed queries' log-sum-exp; all zeros without observed queries.
        unprotected: int64 [rows], dropped slots of score +inf; None if the method does not count them.
    """

    layout: Layout
    source: Tensor
    appends: bool
    state: Tensor | None = None
    contents: Contents | None = None
    drift: LogSumExpDrift = LogSumExpDrift()
    unprotected: Tensor | None = None


Schedule = dict[tuple[int, int], StorageChange]
"""A static method's changes by (layer, segment); nothing is cached of the last segment, which has no entry."""


def plan_change(
    method: Method, view: CacheView, layout: Layout, free_slots: int = 0, counts: Sequence[int] | None = None
) -> StorageChange:
    """Call a method's `keep` after a segment and return the storage change.

    Args:
        method: a prepared method.
        view: one layer right after the segment.
        layout: layout of the layer's storage before the segment is stored.
        free_slots: free slots behind each row of the new layout.
        counts: number of slots that each row keeps; None to read them back from the device.

    Raises:
        NotANumber: the method's scores are NaN.
        WrongTensor: the method's scores or its result have a wrong shape or dtype.
    """
    return apply_keep(method, view, call_keep(method, view), layout, free_slots, counts)


def call_keep(method: Method, view: CacheView) -> Tensor | None:
    """Return the checked result of a method's `keep`; raises as `plan_change`."""
    with add_error_context(method, view):
        keep = method.keep(view)
        if keep is not None:
            rows = "[heads, slots]" if method.static else "[rows, slots]"
            require_tensor("keep", keep, view.position.shape, rows, torch.bool)
    return keep


def call_select_attended(method: Method, view: CacheView) -> Tensor | None:
    """Return the checked result of a method's `select_attended`; raises as `plan_change`."""
    with add_error_context(method, view):
        selected = method.select_attended(view)
        if selected is not None:
            require_tensor("select_attended", selected, view.position.shape, "[rows, slots]", torch.bool)
    return selected


@contextmanager
def add_error_context(method: Method, view: CacheView) -> Iterator[None]:
    """Add method, layer and segment to an error's message."""
    try:
        yield
    except (NotANumber, WrongTensor, AttributeError) as error:
        reported: Exception = error
        if isinstance(error, AttributeError):
            if not isinstance(error.obj, CacheView):
                raise
            reported = UserError(
                f"a View has no {error.name}; kvbench/methods/shared/view.py has what a method can read"
            )
        where = f"layer {view.layer}, segment {view.segment.index}"
        raise type(reported)(f"method={method.title}: {where}: {reported}") from None


def apply_keep(
    method: Method,
    view: CacheView,
    keep: Tensor | None,
    layout: Layout,
    free_slots: int,
    counts: Sequence[int] | None = None,
) -> StorageChange:
    """Return the storage change for a method's result `keep`; other arguments as for `plan_change`."""
    segment = view.segment
    if view.padding is not None:  # a row may lack slots of the current segment
        keep = view.position >= 0 if keep is None else keep & (view.position >= 0)
    after, source = source_table(layout, keep, view.position, segment.length, free_slots, counts)
    everything = after.total == layout.total + len(layout.counts) * segment.length
    state = view.state if method.uses.state else None
    if state is not None and not (keep is None and layout.uniform):
        exists = view.position >= 0
        state = pack_rows(view.state, exists if keep is None else keep & exists, 0, after.longest)
    contents, drift = None, LogSumExpDrift()
    if keep is not None and view.replaced is not None:
        kept = keep & (view.position >= 0)
        origins = list_origins(after, kept)
        contents = Contents(*(part.flatten(0, 1)[origins] for part in view.replaced))
    if count := method.uses.lse_queries:
        drift = measure_drift(view, keep, count)
    appends = layout.uniform and everything and not layout.free_slots and contents is None
    return StorageChange(after, source, appends, state, contents, drift, view.unprotected)


def measure_drift(view: CacheView, keep: Tensor | None, lse_queries: int) -> LogSumExpDrift:
    """Measure how a drop changes the log-sum-exp of a segment's last queries.

    Args:
        view: one layer right after the segment, after any call of `replace`.
        keep: bool [rows, slots], the kept slots; None for all.
        lse_queries: number of queries.
    """
    queries = torch.arange(max(0, view.segment.length - lse_queries), view.segment.length)
    exists = view.position >= 0
    kept = exists if keep is None else keep & exists
    before = view.lse(queries).flatten(1)
    after = before if keep is None else view.lse(queries, kept).flatten(1)
    # Queries that a row lacks, or that lose all keys they see, are left out.
    unseen = ~(before.isfinite() & after.isfinite())
    rows = [x.masked_fill(unseen, torch.nan).nanmean(1) for x in (before, after, after - before)]
    dropped = (exists & ~kept).any(1)
    total = rows[2].nan_to_num(0).masked_fill(~dropped, 0).sum()
    means = [x.unflatten(0, (-1, view.heads)).nanmean(1).nan_to_num(0).tolist() for x in rows[:2]]
    return LogSumExpDrift(float(total), int(dropped.sum()), *means)


def show_layer(
    layer: int,
    segment: Segment,
    layout: Layout,
    spec: ModelSpec,
    sequences: int = 1,
    inputs: LayerInputs | None = None,
    state: Tensor | None = None,
    prompts: Sequence[int] = (),
    padding: Tensor | None = None,
    prompt_lengths: Sequence[int] = (),
    position: Tensor | None = None,
) -> CacheView:
    """Build the view of one layer right after a segment.

    Args:
        layer: index of the layer.
        segment: the segment that just ran.
        layout: layout of the layer's storage before the segment is stored.
        spec: the model's shapes.
        sequences: number of sequences in the layout.
        inputs: inputs of the layer's attention; None for a static method.
        state: float32 [rows, longest, ...], state of the cached slots; new tokens start at 0. None without state.
        prompts: index of each sequence's prompt in the run.
        padding: int64 [rows], padding tokens in front of each row's prompt; None without padding.
        prompt_lengths: tokens of each sequence's prompt; empty without padding.
        position: positions of another layer's view after this segment, with equal layout and padding; None to compute.
    """
    if position is None:
        position = list_positions(layout, segment.start, segment.length)
        if padding is not None:
            position.masked_fill_(position < padding[:, None], -1)
    values = position.new_empty(0, 0, dtype=torch.float32)
    if state is not None:
        values = F.pad(state, (*(0, 0) * (state.ndim - 2), 0, position.shape[1] - state.shape[1]))
    charge, heads = padding if spec.padding_counts else None, spec.heads
    shown = (layer, segment, sequences, heads, position, spec.segments, values)
    return CacheView(*shown, inputs, prompts, padding, charge, prompt_lengths)


def count_free_slots(spec: ModelSpec, index: int) -> int:
    """Return the free slots of each row while segment `index` runs: its length if it is causal, else 0."""
    return spec.segments[index].length if spec.segments[index].causal else 0


def build_schedule(
    spec: ModelSpec,
    method: Method,
    device: torch.device | str = "cpu",
    find_free_slots: Callable[[int], int] | None = None,
) -> Schedule:
    """Return all changes of a static method, for one sequence.

    A layer with the layout of the layer before it and the same kept slots has the same change object.

    Args:
        spec: the model's shapes.
        method: a prepared method.
        device: device of the tables.
        find_free_slots: returns the free slots of each row while a segment runs; None for `count_free_slots`.
    """
    changes: Schedule = {}
    find_free_slots = find_free_slots or partial(count_free_slots, spec)
    layouts = [empty_layout(spec.heads, device, find_free_slots(0))] * spec.layers
    for segment in spec.segments[:-1]:
        free_slots, kept = find_free_slots(segment.index + 1), None
        view = show_layer(0, segment, layouts[0], spec)
        for layer, layout in enumerate(layouts):
            alike = layer > 0 and layout is layouts[layer - 1]
            if layer > 0:
                view = replace(view, layer=layer) if alike else show_layer(layer, segment, layout, spec)
            keep = call_keep(method, view)
            if not (alike and are_equal(keep, kept)):
                change = apply_keep(method, view, keep, layout, free_slots)
            changes[layer, segment.index], kept = change, keep
        layouts = [changes[layer, segment.index].layout for layer in range(spec.layers)]
    return changes


def are_equal(keep: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two results of `keep` for the same slots are equal."""
    return keep is other or (keep is not None and other is not None and torch.equal(keep, other))


def predict_row_lengths(spec: ModelSpec, method: Method, schedule: Schedule | None = None) -> Ints | None:
    """Return the tokens that each row holds after each cached segment, int64 [K - 1, L, H]; None if data decide.

    Rows are the KV heads of one sequence; all sequences hold the same number. Lengths follow from the schedule of a
    static method, and from `capacity` of any other method.

    Args:
        spec: the model's shapes.
        method: a method prepared for that model.
        schedule: schedule of a static method; None to compute it.
    """
    cached = [segment for segment in spec.segments if not segment.last]
    lengths = np.zeros((len(cached), spec.layers, spec.heads), np.int64)
    changes = schedule or (build_schedule(spec, method) if type(method).static else {})
    for segment in cached:
        for layer in range(spec.layers):
            if changes:
                lengths[segment.index, layer] = changes[layer, segment.index].layout.counts
                continue
            capacity = method.capacity(layer, segment)
            if capacity is None:
                return None
            before = lengths[segment.index - 1, layer] if segment.index else 0
            lengths[segment.index, layer] = np.minimum(capacity, before + segment.length)
    return lengths


def predict_ring_slots(
    spec: ModelSpec, lengths: Ints, find_free_slots: Callable[[int], int] | None = None
) -> int:
    """Return the slots of a ring that holds one sequence's keys and values for a whole generation.

    Args:
        spec: the model's shapes.
        lengths: tokens of each row, int64 [K - 1, L, H].
        find_free_slots: as for `build_schedule`.
    """
    held = np.pad(lengths.sum(2), ((1, 0), (0, 0)))
    find_free_slots = find_free_slots or partial(count_free_slots, spec)
    free = [find_free_slots(segment.index) * spec.heads for segment in spec.segments]
    return ring_slots((held + np.array(free)[:, None]).tolist())


def sum_tokens(lengths: Ints) -> Ints:
    """Return the tokens that one sequence holds after layer l of segment k, int64 [K, L], as in `Ledger.held`.

    Layers up to l have dropped tokens after segment k, later layers only after segment k - 1. The last row is held
    while the last segment runs, whose tokens are never cached.

    Args:
        lengths: tokens of each row, int64 [K - 1, L, H].
    """
    after = np.pad(lengths.sum(2), ((1, 0), (0, 0)))
    before = after.sum(1, keepdims=True)
    moved = np.diff(after, axis=0, append=after[-1:])
    return before + moved.cumsum(1)
