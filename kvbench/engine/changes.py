"""How a layer's storage changes after a segment: what a method's answer comes to as layout and source table."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, Segment
from kvbench.engine.view import CacheView, Inputs
from kvbench.kernels.compact import source_table
from kvbench.kernels.layout import Layout, empty_layout, list_positions, pack_rows
from kvbench.methods.base import Method


class Change(NamedTuple):
    """One layer's storage after a segment.

    Attributes:
        layout: where rows lie from then on.
        source: where their slots come from, int32 [capacity] (`kernels.compact.source_table`).
        appends: nothing leaves, all rows are equally long and come to be longer by the whole segment.
        state: float32 [rows, longest], a stateful method's numbers of the slots that stay; None for other methods.
    """

    layout: Layout
    source: Tensor
    appends: bool
    state: Tensor | None = None


Schedule = dict[tuple[int, int], Change]
"""A static method's changes by (layer, segment); nothing is cached of the last segment, which has no entry."""


def ask_method(method: Method, view: CacheView, layout: Layout, room: int = 0) -> Change:
    """Ask a method what to keep after a segment.

    Args:
        method: prepared.
        view: one layer right after the segment.
        layout: of the layer's storage before the segment is stored.
        room: free slots behind every row of the new layout.
    """
    keep, at = method.keep(view), view.at
    if view.padding is not None:  # a slot of the current segment may not exist
        keep = view.position >= 0 if keep is None else keep & (view.position >= 0)
    after, source = source_table(layout, keep, at.start, at.length, room)
    everything = after.total == layout.total + len(layout.counts) * at.length
    state = None
    if method.stateful:
        exists = view.position >= 0
        state = pack_rows(view.state, exists if keep is None else keep & exists, 0, after.longest)
    return Change(after, source, layout.uniform and everything and not layout.room, state)


def show_layer(
    layer: int,
    at: Segment,
    layout: Layout,
    spec: ModelSpec,
    sequences: int = 1,
    inputs: Inputs | None = None,
    state: Tensor | None = None,
    prompts: Sequence[int] = (),
    padding: Tensor | None = None,
) -> CacheView:
    """Build the view of one layer right after a segment.

    Args:
        layer: index of the layer.
        at: the segment that just ran.
        layout: of the layer's storage before the segment is stored.
        spec: the model's shapes.
        sequences: sequences whose rows the layout has.
        inputs: what attention was computed from; None for a static method.
        state: float32 [rows, longest], numbers of the cached slots; those of the segment's tokens start at 0.
        prompts: number of every sequence's prompt.
        padding: int64 [rows], tokens in front of each row's prompt that do not exist; None if there are none.
    """
    position = list_positions(layout, at.start, at.length)
    if padding is not None:
        position.masked_fill_(position < padding[:, None], -1)
    starts = torch.tensor([segment.start for segment in spec.segments]).to(position.device, non_blocking=True)
    segment = torch.bucketize(position, starts, right=True) - 1
    numbers = torch.zeros((0, 0) if state is None else position.shape, device=position.device)
    if state is not None:
        numbers[:, : state.shape[1]] = state
    return CacheView(layer, at, sequences, spec.heads, position, segment, numbers, inputs, prompts, padding)


def room_behind(spec: ModelSpec, index: int) -> int:
    """Return the free slots that every row needs while segment `index` runs: all of a causal segment's tokens."""
    segment = spec.segments[index]
    return segment.length if segment.causal else 0


def work_out_schedule(spec: ModelSpec, method: Method, device: torch.device | str = "cpu") -> Schedule:
    """Ask a static method at once for all its changes, of one sequence."""
    changes: Schedule = {}
    for layer in range(spec.layers):
        layout = empty_layout(spec.heads, device, room_behind(spec, 0))
        for at in spec.segments[:-1]:
            view = show_layer(layer, at, layout, spec)
            change = ask_method(method, view, layout, room_behind(spec, at.index + 1))
            changes[layer, at.index] = change
            layout = change.layout
    return changes
