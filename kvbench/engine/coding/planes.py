"""Index tables of planes: the plane of each slot of a layer, and the moves that a change of storage needs.

Plane 0 holds numbers in 16 bits: what is young enough (`StorageConfig.residual`), and blocks too small for scales.
Tokens are quantised when the segments up to `QuantRange.stop` are due, once, and stay in their plane until they leave.
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
        block: int64 [positions], number of the block, ascending.
        number: how many blocks there are.
    """

    segment: Tensor
    block: Tensor
    number: int


class PlaneRules(NamedTuple):
    """Assignment of a layer's tokens to planes.

    Attributes:
        wanted: int64 [heads, segments], the plane that each head stores a segment's tokens in.
        min_tokens: int64 [planes], the fewest tokens of a block that are worth a plane; smaller blocks lie in plane 0.
    """

    wanted: Tensor
    min_tokens: Tensor


class QuantRange(NamedTuple):
    """The tokens that are quantised after a segment: those at positions from `start` to before `stop`.

    Attributes:
        start: where the tokens begin that were not due before.
        stop: where those begin that stay in 16 bits for now.
        edges: tokens at which blocks begin, counted from `start`, and the one after the last of them.
    """

    start: int
    stop: int
    edges: tuple[int, ...]


class PlaneRows(NamedTuple):
    """Contents of one plane.

    Attributes:
        layout: where its rows lie.
        slots: int64 [slots], where each of its slots lies in the layer's own layout.
        rows: int64 [slots], row of each slot.
        positions: int64 [slots], position of each slot's token.
        blocks: int64 [entries], row x blocks + block of what has scales of its own, ascending.
        entry: int32 [slots], which of them is a slot's.
        entries: of each row, on the host.
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
        plane: int64 [slots + 1], plane of each slot of the layer's own layout, and 0 behind the last.
        place: int64 [slots + 1], slot of that plane.
        planes: what each plane holds.
    """

    plane: Tensor
    place: Tensor
    planes: tuple[PlaneRows, ...]


class PlaneMove(NamedTuple):
    """Sources of a plane's slots and entries, and the tokens that it receives.

    Attributes:
        slots: int64 [slots], slots of the plane before, then tokens of all rows behind each other: of the current
            segment for plane 0, of those that are due for the others.
        entries: int64 [entries], entries of the plane before, then blocks of all rows that are due.
        exists: bool [rows, tokens that are due], those that the plane gets.
    """

    slots: Tensor
    entries: Tensor
    exists: Tensor


class PlaneUpdate(NamedTuple):
    """Changes of a layer's planes after a segment.

    Attributes:
        after: where slots lie from then on.
        moves: of each plane.
        waiting: int64 [rows x tokens that are due], where the tokens that are due lie among the slots of plane 0
            before, then the tokens of the current segment; None if they are that segment.
    """

    after: Placement
    moves: tuple[PlaneMove, ...]
    waiting: Tensor | None


def number_blocks(spec: ModelSpec, group: int | None, device: torch.device | str) -> Blocks:
    """Number the blocks of all segments: runs of `group` positions, or all of a segment's."""
    segments, blocks, count = [], [], 0
    for at in spec.segments:
        numbers = [count + place // (group or at.length) for place in range(at.length)]
        blocks += numbers
        segments += [at.index] * at.length
        count = numbers[-1] + 1
    return Blocks(torch.tensor(segments, device=device), torch.tensor(blocks, device=device), count)


def find_quant_range(spec: ModelSpec, at: Segment, group: int | None, residual: int) -> QuantRange:
    """Find what is quantised after a segment: the segments that `residual` newer tokens have come to follow."""

    def find_stop(end: int) -> int:
        return max((stop for stop in spec.ends if stop + residual <= end), default=0)

    start, stop = find_stop(at.start), find_stop(at.end)
    edges = {0, stop - start}
    for other in spec.segments:
        if start <= other.start < stop:
            edges |= set(range(other.start - start, other.end - start, group or other.length))
    return QuantRange(start, stop, tuple(sorted(edges)))


def place_no_slots(layout: Layout, planes: int) -> Placement:
    """Return where the slots of a layer lie that has none."""
    none = layout.positions.new_zeros(0)
    plane_rows = PlaneRows(layout, none, none, none, none, none.int(), (0,) * len(layout.counts))
    return Placement(none.new_zeros(1), none.new_zeros(1), (plane_rows,) * planes)


def place_slots(
    before: Placement,
    layout: Layout,
    source: Tensor,
    at: Segment,
    due: QuantRange,
    blocks: Blocks,
    rules: PlaneRules,
) -> PlaneUpdate:
    """Work out where slots come to lie after a segment; the host reads how many, twice.

    Args:
        before: where they lay.
        layout: the layer's own layout from then on, without free slots.
        source: where its slots come from, int32 [slots] (`kernels.compact.source_table`).
        at: the segment.
        due: the tokens that are quantised now.
        blocks: how positions fall into blocks.
        rules: how the layer's tokens are stored.
    """
    rows, positions = list_slots(layout)
    count = len(layout.counts)
    origin = torch.where(source < 0, len(before.plane) - 1, source).long()
    block = rows * blocks.number + blocks.block[positions]
    plane = before.plane[origin]
    ready = (positions >= due.start) & (positions < due.stop) & (plane == 0)
    wanted = rules.wanted[rows % len(rules.wanted), blocks.segment[positions]]
    members = rows.new_zeros(count * blocks.number).index_add_(0, block, ready.long())
    enters = ready & (members[block] >= rules.min_tokens[wanted])
    plane = torch.where(enters, wanted, plane)
    held = [rows.new_zeros(count).index_add_(0, rows, (plane == p).long()) for p in range(len(before.planes))]
    counts = torch.stack(held).tolist()

    place, planes, moves = torch.zeros_like(rows), [], []
    width = due.stop - due.start
    token = rows * width + positions - due.start  # among those that are due
    old = before.planes[0].layout.total
    stored = torch.where(source < 0, old - 1 - source.long(), before.place[origin])  # in 16 bits until now
    for number, plane_rows in enumerate(before.planes):
        own = plane == number
        inside, slots, places = _arrange(layout, rows, positions, own, counts[number])
        place = torch.where(own, places, place)
        after = _describe(inside, slots, rows, positions, block, blocks.number)
        comes = stored
        if number:
            stays = before.plane[origin] == number
            comes = torch.where(stays, before.place[origin], plane_rows.layout.total + token)
        gets = _mark(token, enters & own, count * width).view(count, width)
        moves.append(PlaneMove(comes[slots], _find_entries(plane_rows, after, due, blocks), gets))
        planes.append(after)
    waiting = None
    if due.start != at.start or due.stop != at.end:
        waiting = rows.new_zeros(count * width + 1)
        waiting[torch.where(enters, token, count * width)] = stored
        waiting = waiting[:-1]
    behind = plane.new_zeros(1)
    return PlaneUpdate(
        Placement(torch.cat((plane, behind)), torch.cat((place, behind)), tuple(planes)),
        tuple(moves),
        waiting,
    )


def _arrange(
    layout: Layout, rows: Tensor, positions: Tensor, own: Tensor, counts: list[int]
) -> tuple[Layout, Tensor, Tensor]:
    """Lay out a plane's slots.

    Args:
        layout: the layer's own.
        rows: int64 [slots] of it.
        positions: int64 [slots] of it.
        own: bool [slots] of it, those that lie in the plane.
        counts: how many of each row do.

    Returns:
        The plane's layout; where its slots lie in the layer's own, int64 [slots of the plane]; where those of the layer
        lie in the plane, int64 [slots], which means nothing for others than its own.
    """
    before = own.cumsum(0) - own.long()
    rank = before - before[layout.offsets[rows]]
    longest = max(counts, default=0)
    table = positions.new_full((len(counts) * longest + 1,), -1)  # what is not its own goes to the last entry
    table[torch.where(own, rows * longest + rank, len(table) - 1)] = torch.where(own, positions, -1)
    inside = arrange_rows(table[:-1].view(len(counts), longest), counts)
    places = inside.offsets[rows] + rank
    slots = rows.new_zeros(inside.total + 1)
    slots[torch.where(own, places, inside.total)] = torch.arange(len(rows), device=rows.device)
    return inside, slots[:-1], places


def _describe(
    inside: Layout, slots: Tensor, rows: Tensor, positions: Tensor, block: Tensor, count: int
) -> PlaneRows:
    """Return what a plane holds whose slots lie at `slots` of the layer's own layout."""
    blocks, entry = torch.unique(block[slots], return_inverse=True)
    entries = torch.bincount(blocks // count, minlength=len(inside.counts)).tolist()
    return PlaneRows(inside, slots, rows[slots], positions[slots], blocks, entry.int(), tuple(entries))


def _find_entries(before: PlaneRows, after: PlaneRows, due: QuantRange, blocks: Blocks) -> Tensor:
    """Return where the entries of a plane come from, int64 [entries] (`PlaneMove.entries`)."""
    known = len(before.blocks)
    new = len(due.edges) - 1
    row, block = after.blocks // blocks.number, after.blocks % blocks.number
    fresh = known + row * new + block - (int(blocks.block[due.start]) if new else 0)
    if not known:
        return fresh
    found = torch.searchsorted(before.blocks, after.blocks).clamp_(max=known - 1)
    return torch.where(before.blocks[found] == after.blocks, found, fresh)


def _mark(token: Tensor, chosen: Tensor, count: int) -> Tensor:
    """Return which of `count` tokens are chosen, bool."""
    marks = torch.zeros(count + 1, dtype=torch.bool, device=token.device)
    marks[torch.where(chosen, token, count)] = True
    return marks[:-1]


def count_rows(values: Sequence[int], heads: int) -> list[int]:
    """Sum numbers of rows over the heads of each sequence."""
    return [sum(values[row : row + heads]) for row in range(0, len(values), heads)]
