"""Index tables of planes: the plane of each slot of a layer, and the moves of a change of storage.

Plane 0 holds 16-bit values: the newest tokens (`StorageConfig.residual`), and blocks too small for scales. Tokens are
quantised once, when the segments up to `QuantRange.stop` are due, and stay in their plane until eviction.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, Segment
from kvbench.kernels.layout import Layout, arrange_rows
from kvbench.kernels.planes import list_slots


class Blocks(NamedTuple):
    """Segment and block of each position.

    Attributes:
        segment: int64 [positions], index of the segment.
        block: int64 [positions], index of the block, ascending.
        number: number of blocks.
    """

    segment: Tensor
    block: Tensor
    number: int


class PlaneRules(NamedTuple):
    """Assignment of a layer's tokens to planes.

    Attributes:
        target: int64 [heads, segments], plane in which each head stores a segment's tokens.
        min_tokens: int64 [planes], smallest block of a plane, in tokens; smaller blocks are stored in plane 0.
    """

    target: Tensor
    min_tokens: Tensor


class QuantRange(NamedTuple):
    """Positions of the tokens that are quantised after a segment.

    Attributes:
        start: first token that was not due before.
        stop: first token that stays in 16 bits for now.
        edges: tokens at which blocks begin, counted from `start`, then the end of the last block.
    """

    start: int
    stop: int
    edges: tuple[int, ...]


class PlaneRows(NamedTuple):
    """Contents of one plane.

    Attributes:
        layout: layout of its rows.
        slots: int64 [slots], index of each of its slots in the layer's layout.
        rows: int64 [slots], row of each slot.
        positions: int64 [slots], position of each slot's token.
        blocks: int64 [entries], row x blocks + block of each entry of the scales, ascending.
        entry: int32 [slots], entry of each slot.
        entries: number of entries of each row, on the host.
    """

    layout: Layout
    slots: Tensor
    rows: Tensor
    positions: Tensor
    blocks: Tensor
    entry: Tensor
    entries: tuple[int, ...]


class Placement(NamedTuple):
    """Plane and slot of each slot of a layer.

    Attributes:
        plane: int64 [slots + 1], plane of each slot of the layer's layout, then 0.
        slot: int64 [slots + 1], index of the slot in that plane, then 0.
        planes: contents of each plane.
    """

    plane: Tensor
    slot: Tensor
    planes: tuple[PlaneRows, ...]


class PlaneMove(NamedTuple):
    """Sources of a plane's slots and entries, and the tokens that it receives.

    Attributes:
        slots: int64 [slots], index into the plane's old slots followed by new tokens, row after row: the current
            segment's for plane 0, the due tokens for other planes.
        entries: int64 [entries], index into the plane's old entries followed by the due blocks of all rows.
        exists: bool [rows, due tokens], tokens that the plane receives.
    """

    slots: Tensor
    entries: Tensor
    exists: Tensor


class PlaneUpdate(NamedTuple):
    """Changes of a layer's planes after a segment.

    Attributes:
        after: new planes and indices of the slots.
        moves: moves of each plane.
        waiting: int64 [rows x due tokens], index of the due tokens into the old slots of plane 0 followed by the
            current segment; None if the due tokens are the current segment.
    """

    after: Placement
    moves: tuple[PlaneMove, ...]
    waiting: Tensor | None


def number_blocks(spec: ModelSpec, group: int | None, device: torch.device | str) -> Blocks:
    """Number the blocks of all segments: runs of `group` positions, or whole segments if it is None."""
    segments, blocks, count = [], [], 0
    for segment in spec.segments:
        indices = [count + position // (group or segment.length) for position in range(segment.length)]
        blocks += indices
        segments += [segment.index] * segment.length
        count = indices[-1] + 1
    return Blocks(torch.tensor(segments, device=device), torch.tensor(blocks, device=device), count)


def find_quant_range(spec: ModelSpec, segment: Segment, group: int | None, residual: int) -> QuantRange:
    """Find the tokens to quantise after a segment: segments that at least `residual` tokens follow."""

    def find_stop(end: int) -> int:
        return max((stop for stop in spec.ends if stop + residual <= end), default=0)

    start, stop = find_stop(segment.start), find_stop(segment.end)
    edges = {0, stop - start}
    for other in spec.segments:
        if start <= other.start < stop:
            edges |= set(range(other.start - start, other.end - start, group or other.length))
    return QuantRange(start, stop, tuple(sorted(edges)))


def place_no_slots(layout: Layout, planes: int) -> Placement:
    """Return the placement of a layer without slots."""
    none = layout.positions.new_zeros(0)
    plane_rows = PlaneRows(layout, none, none, none, none, none.int(), (0,) * len(layout.counts))
    return Placement(none.new_zeros(1), none.new_zeros(1), (plane_rows,) * planes)


def place_slots(
    before: Placement,
    layout: Layout,
    source: Tensor,
    segment: Segment,
    due: QuantRange,
    blocks: Blocks,
    rules: PlaneRules,
) -> PlaneUpdate:
    """Compute planes and indices of slots after a segment; the host reads counts from the device twice.

    Args:
        before: placement before the segment is stored.
        layout: the layer's new layout, without free slots.
        source: origin of its slots, int32 [slots] (`kernels.compact.source_table`).
        segment: the segment.
        due: the tokens that are quantised now.
        blocks: blocks of all positions.
        rules: assignment of the layer's tokens to planes.
    """
    rows, positions = list_slots(layout)
    count = len(layout.counts)
    origin = torch.where(source < 0, len(before.plane) - 1, source).long()
    block = rows * blocks.number + blocks.block[positions]
    plane = before.plane[origin]
    ready = (positions >= due.start) & (positions < due.stop) & (plane == 0)
    target = rules.target[rows % len(rules.target), blocks.segment[positions]]
    members = rows.new_zeros(count * blocks.number).index_add_(0, block, ready.long())
    enters = ready & (members[block] >= rules.min_tokens[target])
    plane = torch.where(enters, target, plane)
    held = [rows.new_zeros(count).index_add_(0, rows, (plane == p).long()) for p in range(len(before.planes))]
    counts = torch.stack(held).tolist()

    slot, planes, moves = torch.zeros_like(rows), [], []
    width = due.stop - due.start
    token = rows * width + positions - due.start  # index among the due tokens
    old = before.planes[0].layout.total
    stored = torch.where(source < 0, old - 1 - source.long(), before.slot[origin])  # 16 bits until now
    for index, plane_rows in enumerate(before.planes):
        chosen = plane == index
        inside, slots, plane_slots = _arrange(layout, rows, positions, chosen, counts[index])
        slot = torch.where(chosen, plane_slots, slot)
        after = _describe(inside, slots, rows, positions, block, blocks.number)
        sources = stored
        if index:
            kept = before.plane[origin] == index
            sources = torch.where(kept, before.slot[origin], plane_rows.layout.total + token)
        received = _mark(token, enters & chosen, count * width).view(count, width)
        moves.append(PlaneMove(sources[slots], _find_entries(plane_rows, after, due, blocks), received))
        planes.append(after)
    waiting = None
    if due.start != segment.start or due.stop != segment.end:
        waiting = rows.new_zeros(count * width + 1)
        waiting[torch.where(enters, token, count * width)] = stored
        waiting = waiting[:-1]
    behind = plane.new_zeros(1)
    return PlaneUpdate(
        Placement(torch.cat((plane, behind)), torch.cat((slot, behind)), tuple(planes)),
        tuple(moves),
        waiting,
    )


def _arrange(
    layout: Layout, rows: Tensor, positions: Tensor, chosen: Tensor, counts: list[int]
) -> tuple[Layout, Tensor, Tensor]:
    """Lay out a plane's slots.

    Args:
        layout: the layer's layout.
        rows: int64 [slots], row of each slot.
        positions: int64 [slots], position of each slot's token.
        chosen: bool [slots], whether a slot is in the plane.
        counts: number of the plane's slots in each row.

    Returns:
        The plane's layout; indices of its slots in the layer's layout, int64 [slots of the plane]; indices of the
        layer's slots in the plane, int64 [slots], arbitrary for slots of other planes.
    """
    before = chosen.cumsum(0) - chosen.long()
    rank = before - before[layout.offsets[rows]]
    longest = max(counts, default=0)
    table = positions.new_full((len(counts) * longest + 1,), -1)  # slots of other planes go to the last entry
    table[torch.where(chosen, rows * longest + rank, len(table) - 1)] = torch.where(chosen, positions, -1)
    inside = arrange_rows(table[:-1].view(len(counts), longest), counts)
    plane_slots = inside.offsets[rows] + rank
    slots = rows.new_zeros(inside.total + 1)
    slots[torch.where(chosen, plane_slots, inside.total)] = torch.arange(len(rows), device=rows.device)
    return inside, slots[:-1], plane_slots


def _describe(
    inside: Layout, slots: Tensor, rows: Tensor, positions: Tensor, block: Tensor, count: int
) -> PlaneRows:
    """Return the contents of a plane with the given slots of the layer's layout; `count` blocks per row."""
    blocks, entry = torch.unique(block[slots], return_inverse=True)
    entries = torch.bincount(blocks // count, minlength=len(inside.counts)).tolist()
    return PlaneRows(inside, slots, rows[slots], positions[slots], blocks, entry.int(), tuple(entries))


def _find_entries(before: PlaneRows, after: PlaneRows, due: QuantRange, blocks: Blocks) -> Tensor:
    """Return the origins of a plane's entries, int64 [entries] (`PlaneMove.entries`)."""
    known = len(before.blocks)
    new = len(due.edges) - 1
    row, block = after.blocks // blocks.number, after.blocks % blocks.number
    fresh = known + row * new + block - (int(blocks.block[due.start]) if new else 0)
    if not known:
        return fresh
    matches = torch.searchsorted(before.blocks, after.blocks).clamp_(max=known - 1)
    return torch.where(before.blocks[matches] == after.blocks, matches, fresh)


def _mark(token: Tensor, chosen: Tensor, count: int) -> Tensor:
    """Return a mask of the chosen ones among `count` tokens, bool [count]."""
    marks = torch.zeros(count + 1, dtype=torch.bool, device=token.device)
    marks[torch.where(chosen, token, count)] = True
    return marks[:-1]


def count_rows(values: Sequence[int], heads: int) -> list[int]:
    """Sum values of rows over the heads of each sequence."""
    return [sum(values[row : row + heads]) for row in range(0, len(values), heads)]
