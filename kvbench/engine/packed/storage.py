"""Storage in few bits of all layers: tokens are quantised once, when they are due, and read as they are attended to."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, Segment
from kvbench.engine.coding.formats import (
    Books,
    Coding,
    Packing,
    PlaneFormat,
    Tokens,
    count_sources,
    encode,
    list_layer_formats,
    make_empty,
    name_table,
)
from kvbench.engine.coding.planes import (
    Placement,
    PlaneMove,
    PlaneRows,
    PlaneUpdate,
    QuantRange,
    find_quant_range,
    number_blocks,
    place_no_slots,
    place_slots,
)
from kvbench.engine.packed.store import PackedStore
from kvbench.engine.schedule import Change, Schedule
from kvbench.engine.storage import CacheBackend
from kvbench.kernels.layout import Past, empty_layout
from kvbench.kernels.planes import Codes, Plane, halve, unrotate
from kvbench.kernels.quantised_attention import quantised_attention
from kvbench.kernels.ragged_attention import PIECE_BYTES, ragged_attention
from kvbench.methods.shared.base import Method


class PackedStorage(CacheBackend):
    """Storage in few bits for all layers; tokens in flight lie apart from those that are kept.

    Args:
        spec: the model's shapes.
        method: prepared.
        packing: how numbers are stored.
        dtype: in which attention reads keys and values.
        device: where they live.
        rotation: complex64 [positions, D/2], what neighbouring channels of keys are multiplied by; None if by nothing.
        books: static codebooks, where the storage or forms want them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        method: Method,
        packing: Packing,
        dtype: torch.dtype,
        device: torch.device,
        rotation: Tensor | None = None,
        books: Books | None = None,
    ) -> None:
        self.max_read_bytes = 0
        self._spec, self._method, self._dtype, self._device = spec, method, dtype, device
        self._half = dtype if dtype.itemsize == 2 else torch.float16
        storage = packing.storage
        self._blocks = number_blocks(spec, storage.group, device)
        self._quant_ranges = [
            find_quant_range(spec, at, storage.group, storage.residual) for at in spec.segments
        ]
        self._sources = [min(at.index, count_sources(spec) - 1) for at in spec.segments]
        self._source = torch.tensor(self._sources, device=device)[self._blocks.segment]
        self._rotation = self._read_rotation = rotation if storage.before_rotation else None
        if self._read_rotation is not None and device.type == "cuda" and dtype.itemsize == 2:
            self._read_rotation = halve(self._read_rotation)
        self._books = books or {}
        self._forms = list_layer_formats(spec, method, packing, device)
        self._empty: dict[tuple[int, int], Placement] = {}  # by rows and planes
        self._known: dict[tuple[int, int, int], tuple[Change, Placement, PlaneUpdate]] = {}

    def prepare(self, sequences: int, batch: int, rows: int, schedule: Schedule) -> None:
        """Get ready for a generation.

        Raises:
            ValueError: sequences without a common layout are to share tokens.
        """
        self._batch, self._rows, self._twins = batch, rows, sequences // self._spec.branches
        self._schedule, self.max_read_bytes = schedule, 0
        if batch < sequences and any(fmt.shared for forms in self._forms for fmt in forms.formats):
            raise ValueError(
                "tokens are shared by sequences whose rows lie alike: by a static method, without padding"
            )

    def open(self, layer: int, free_slots: int = 0) -> PackedStore:
        """Return a layer's storage that holds nothing yet."""
        formats = self._forms[layer].formats
        at = (self._rows, len(formats))
        if at not in self._empty:
            self._empty[at] = place_no_slots(empty_layout(self._rows, self._device), len(formats))
        placement, channels = self._empty[at], self._spec.head_dim
        planes = [
            self._join(
                layer,
                fmt,
                plane_rows,
                *make_empty(fmt, self._stored(fmt), channels, self._half, self._device),
            )
            for fmt, plane_rows in zip(formats, placement.planes, strict=True)
        ]
        return PackedStore(placement.planes[0].layout, formats, tuple(planes), placement, self._dtype)

    def change(
        self, layer: int, store: PackedStore, present: tuple[Tensor, Tensor], at: Segment, change: Change
    ) -> PackedStore:
        """Return a layer's storage after a segment; tokens that are due by then are quantised."""
        self._note_whole(store)
        due, placed = self._quant_ranges[at.index], self._place(layer, store, at, change)
        current = [Codes(x.flatten(1, 2).to(self._half)) for x in present]
        keys, values = present
        first = store.planes[0]
        if placed.waiting is not None:
            keys, values = (
                torch.cat((old.numbers, new.numbers), 1)
                .index_select(1, placed.waiting)
                .unflatten(1, (self._rows, due.stop - due.start))
                for old, new in zip((first.keys, first.values), current, strict=True)
            )
        unrotated = None
        if self._rotation is not None:
            unrotated = unrotate(keys, self._rotation[due.start : due.stop])
        planes, entering = [], self._forms[layer].list_planes(self._spec, due.start, due.stop)
        for number, (fmt, plane, plane_rows, move) in enumerate(
            zip(store.formats, store.planes, placed.after.planes, placed.moves, strict=True)
        ):
            new: tuple[Codes | None, Codes | None] = (None, None)
            if number == 0:
                new = (current[0], current[1])
            elif number in entering:
                tokens = Tokens(keys, values, unrotated, move.exists, due.edges, self._list_sources(due))
                tokens = tokens.take(self._stored(fmt))
                new = encode(fmt, tokens, self._read_books(layer, fmt), self._half)
            keys_codes, values_codes = (
                _follow(how, old, one, move) for how, old, one in zip(fmt[1:3], plane[2:4], new, strict=True)
            )
            planes.append(self._join(layer, fmt, plane_rows, keys_codes, values_codes))
        settled = (change.layout, store.formats, tuple(planes), placed.after, self._dtype)
        return PackedStore(*settled, state=change.state)

    def close(self, store: PackedStore) -> None:
        """Take note of what was read back of it; planes end with the last who holds them."""
        self._note_whole(store)

    def count_rebuild(self, before: int, after: int) -> int:
        """Return the bytes of a layer before and after: all new planes are made before the old ones are gone."""
        return before + after

    def attend(self, store: PackedStore, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Attend over a layer's past, read back in pieces, and the whole present.

        A method that looks at data will ask for all of the past: it is read back once for both.
        """
        if self._method.static or q.is_cuda:
            return self._attend_pieces(store, q, k, v)
        return ragged_attention(q, k, v, store.past, self._spec.logit_scale)

    def attend_step(
        self, store: PackedStore, q: Tensor, k: Tensor, v: Tensor, length: int, filled: Tensor
    ) -> Tensor:
        """Attend with the next tokens of a causal segment, which stay as they are until it is full."""
        before, tokens = store.filled, k.shape[2]
        if store.flight is None:
            shape = (*k.shape[:2], length, k.shape[3])
            store.flight = (k.new_empty(shape), v.new_empty(shape))
        seen = []
        for flight, new in zip(store.flight, (k, v), strict=True):
            flight[:, :, before : before + tokens] = new
            seen.append(flight[:, :, : before + tokens])
        if tokens == 1 or not before:
            return self._attend_pieces(store, q, seen[0], seen[1], causal=tokens > 1)[0]
        asked = q.unflatten(2, (-1, tokens))
        out = []
        for token in range(tokens):
            keys, values = (part[:, :, : before + token + 1] for part in seen)
            out.append(self._attend_pieces(store, asked[:, :, :, token], keys, values)[0])
        return torch.stack(out, 3).flatten(2, 3)

    def fill(self, store: PackedStore, k: Tensor, v: Tensor) -> None:
        """Take all tokens of a causal segment."""
        store.flight = (k, v)

    def view_flight(self, store: PackedStore, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a full causal segment."""
        assert store.flight is not None
        return store.flight

    def _attend_pieces(
        self, store: PackedStore, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with the sequences that are read back together, one such piece after the other.

        On CUDA nothing is read back: kernels attend to each plane where it lies.
        """
        if q.is_cuda:
            return self._attend_planes(store, q, k, v, causal=causal)
        found = []
        for some in self._cut(store):
            self._note_read(store, len(some))
            own, past = slice(some.start, some.stop), store.read(some)
            found.append(
                ragged_attention(q[own], k[own], v[own], past, self._spec.logit_scale, causal=causal)
            )
        if len(found) == 1:
            return found[0]
        sums = [lse for _, lse in found if lse is not None]
        return torch.cat([out for out, _ in found]), torch.cat(sums) if sums else None

    def _attend_planes(
        self, store: PackedStore, q: Tensor, k: Tensor, v: Tensor, *, causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to the present and the numbers in 16 bits, then to one plane of codes after the other.

        Until the last of them the output is float32, so that it is rounded once.
        """
        scale, (first, *others) = self._spec.logit_scale, store.planes
        past = Past(first.keys.numbers, first.values.numbers, first.layout)
        coded = [plane for plane in others if plane.layout.total]
        dtype = torch.float32 if coded else q.dtype
        out, lse = ragged_attention(q, k, v, past, scale, causal=causal, dtype=dtype)
        if not coded:
            return out, lse
        assert lse is not None  # on CUDA it always is found
        state = out, lse
        for plane in coded:
            state = quantised_attention(q, plane, scale, state)
        return state[0].to(q.dtype), state[1]

    def _place(self, layer: int, store: PackedStore, at: Segment, change: Change) -> PlaneUpdate:
        """Work out where slots come to lie; layers that are alike share it, as do generations of a static method."""
        rules = self._forms[layer].rules
        key = (id(change), id(store.placement), id(rules))
        if key in self._known:
            return self._known[key][2]
        placed = place_slots(
            store.placement,
            change.layout,
            change.source,
            at,
            self._quant_ranges[at.index],
            self._blocks,
            rules,
        )
        if self._schedule.get((layer, at.index)) is change:
            self._known[key] = (change, store.placement, placed)
        return placed

    def _join(self, layer: int, fmt: PlaneFormat, plane_rows: PlaneRows, keys: Codes, values: Codes) -> Plane:
        """Return a plane whose codes know their entries."""
        found = []
        for name, how, codes in (("keys", fmt.keys, keys), ("values", fmt.values, values)):
            if how == "codebook":
                book = self._books[f"{name}_{fmt.bits}"][layer].flatten(0, 1)
                head, sources = plane_rows.rows % self._spec.heads, count_sources(self._spec)
                entry = head * sources + self._source[plane_rows.positions]
                codes = Codes(codes.numbers, **name_table(book, fmt.bits), entry=entry.int())
            elif how == "channel":
                codes = codes._replace(entry=plane_rows.entry)
            found.append(codes)
        rotation = None if fmt.keys == "plain" else self._read_rotation
        return Plane(plane_rows.layout, fmt.bits, found[0], found[1], plane_rows.positions, rotation)

    def _read_books(self, layer: int, fmt: PlaneFormat) -> tuple[Tensor, Tensor] | None:
        if "codebook" not in (fmt.keys, fmt.values):
            return None
        keys, values = (self._books[f"{name}_{fmt.bits}"][layer] for name in ("keys", "values"))
        return keys, values

    def _list_sources(self, due: QuantRange) -> list[tuple[int, int]]:
        """Return the source of each run of tokens that are due, and the token after its last."""
        return [
            (source, at.end - due.start)
            for source, at in zip(self._sources, self._spec.segments, strict=True)
            if due.start <= at.start < due.stop
        ]

    def _stored(self, fmt: PlaneFormat) -> int:
        """Return how many sequences store a plane."""
        return self._twins if fmt.shared else self._batch

    def _cut(self, store: PackedStore) -> Iterator[range]:
        """Yield sequences that are read back together."""
        unit = min(len(plane.keys.numbers) for plane in store.planes)
        some = max(1, min(unit, PIECE_BYTES // max(1, self._count_read(store))))
        for base in range(0, self._batch, unit):
            for start in range(base, base + unit, some):
                yield range(start, min(start + some, base + unit))

    def _count_read(self, store: PackedStore) -> int:
        """Return the bytes of a sequence's keys and values that are read back."""
        return 2 * store.layout.total * self._spec.head_dim * self._dtype.itemsize

    def _note_whole(self, store: PackedStore) -> None:
        if store.whole is not None:
            self._note_read(store, self._batch)

    def _note_read(self, store: PackedStore, sequences: int) -> None:
        self.max_read_bytes = max(self.max_read_bytes, sequences * self._count_read(store))


def _follow(how: Coding, old: Codes, new: Codes | None, move: PlaneMove) -> Codes:
    """Return what stays of a plane's codes followed by new ones; an entry's number is left as it is."""
    numbers = _gather(old.numbers, None if new is None else new.numbers, move.slots)
    if how not in ("token", "channel"):
        return Codes(numbers)
    assert old.affine is not None
    index = move.slots if how == "token" else move.entries
    return Codes(numbers, _gather(old.affine, None if new is None else new.affine, index))


def _gather(old: Tensor, new: Tensor | None, index: Tensor) -> Tensor:
    """Select along the second dimension of `old` followed by `new`."""
    dtype = old.dtype
    if dtype == torch.float8_e4m3fn:  # it has no index_select
        old, new = old.view(torch.uint8), None if new is None else new.view(torch.uint8)
    joined = old if new is None else torch.cat((old, new), 1)
    return joined.index_select(1, index).view(dtype)
