"""Low-bit storage of all layers: tokens are quantised once, when they are due, and decoded for attention."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, Segment
from kvbench.core.storage import ROTATED_BITS
from kvbench.engine.coding.codecs import NewTokens, name_table
from kvbench.engine.coding.formats import (
    CodebookTensors,
    NumberFormat,
    Packing,
    PlaneFormat,
    count_sources,
    list_layer_formats,
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
from kvbench.engine.schedule import Schedule, StorageChange
from kvbench.engine.storage import CacheBackend
from kvbench.kernels.hadamard import list_levels
from kvbench.kernels.layout import Past, empty_layout, fold_rows
from kvbench.kernels.planes import Codes, Plane, to_complex32, unrotate
from kvbench.kernels.quantised_attention import quantised_attention
from kvbench.kernels.ragged_attention import PIECE_BYTES, ragged_attention
from kvbench.methods.shared.base import Method


class PackedStorage(CacheBackend):
    """Low-bit storage of all layers; pending tokens are stored separately.

    Args:
        spec: the model's shapes.
        method: a prepared method.
        packing: storage format.
        dtype: dtype of decoded keys and values.
        device: device of the storage.
        rotation: complex64 [positions, D/2], factors on neighbouring channels of keys; None without rotation.
        codebooks: static codebooks; None if no format uses them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        method: Method,
        packing: Packing,
        dtype: torch.dtype,
        device: torch.device,
        rotation: Tensor | None = None,
        codebooks: CodebookTensors | None = None,
    ) -> None:
        self.max_read_bytes = 0
        self._spec, self._method, self._dtype, self._device = spec, method, dtype, device
        self._half = dtype if dtype.itemsize == 2 else torch.float16
        storage = packing.storage
        self._blocks = number_blocks(spec, storage.group, device)
        self._quant_ranges = [
            find_quant_range(spec, segment, storage.group, storage.residual) for segment in spec.segments
        ]
        self._sources = [min(segment.index, count_sources(spec) - 1) for segment in spec.segments]
        self._source = torch.tensor(self._sources, device=device)[self._blocks.segment]
        self._rotation = self._read_rotation = rotation if storage.before_rotation else None
        if self._read_rotation is not None and device.type == "cuda" and dtype.itemsize == 2:
            self._read_rotation = to_complex32(self._read_rotation)
        self._codebooks = codebooks or {}
        self._levels = {bits: list_levels(bits).to(device) for bits in ROTATED_BITS}
        self._forms = list_layer_formats(spec, method, packing, device)
        self._empty: dict[tuple[int, int], Placement] = {}  # placements by number of rows and planes
        self._known: dict[tuple[int, int, int], tuple[StorageChange, Placement, PlaneUpdate]] = {}

    def prepare(self, sequences: int, batch: int, rows: int, schedule: Schedule) -> None:
        """Prepare for a generation.

        Raises:
            ValueError: a format shares tokens among sequences, but they have no common layout.
        """
        self._batch, self._rows, self._conditional = batch, rows, sequences // self._spec.branches
        self._schedule, self.max_read_bytes = schedule, 0
        if batch < sequences and any(fmt.shared for forms in self._forms for fmt in forms.formats):
            raise ValueError(
                "sequences share tokens only under a static method, without padding: their rows need one layout"
            )

    def allocate_layer(self, layer: int, free_slots: int = 0) -> PackedStore:
        formats = self._forms[layer].formats
        key = (self._rows, len(formats))
        if key not in self._empty:
            self._empty[key] = place_no_slots(empty_layout(self._rows, self._device), len(formats))
        placement, channels = self._empty[key], self._spec.head_dim
        planes = []
        for fmt, plane_rows in zip(formats, placement.planes, strict=True):
            shape = self._stored(fmt), channels, self._half, self._device
            empty = [side.codec.make_empty(side.bits, *shape) for side in (fmt.keys, fmt.values)]
            planes.append(self._join(layer, fmt, plane_rows, *empty))
        return PackedStore(placement.planes[0].layout, formats, tuple(planes), placement, self._dtype)

    def change(
        self,
        layer: int,
        store: PackedStore,
        present: tuple[Tensor, Tensor],
        segment: Segment,
        change: StorageChange,
    ) -> PackedStore:
        """Return a layer's storage after a segment, with the tokens now due quantised."""
        self._record_decoded(store)
        due, placed = self._quant_ranges[segment.index], self._place(layer, store, segment, change)
        keys, values = (self._fold(x) for x in present)
        current = [Codes(x.flatten(1, 2).to(self._half)) for x in (keys, values)]
        first = store.planes[0]
        if placed.waiting is not None:
            keys, values = (
                torch.cat((old.data, new.data), 1)
                .index_select(1, placed.waiting)
                .unflatten(1, (self._rows, due.stop - due.start))
                for old, new in zip((first.keys, first.values), current, strict=True)
            )
        unrotated = keys
        if self._rotation is not None and layer not in self._spec.unrotated:
            unrotated = unrotate(keys, self._rotation[due.start : due.stop])
        planes, entering = [], self._forms[layer].list_planes(self._spec, due.start, due.stop)
        for number, (fmt, plane, plane_rows, move) in enumerate(
            zip(store.formats, store.planes, placed.after.planes, placed.moves, strict=True)
        ):
            sides = (
                ("keys", fmt.keys, plane.keys, keys if fmt.keys.coding == "plain" else unrotated),
                ("values", fmt.values, plane.values, values),
            )
            blocks, codes = (self._half, move.exists, due.edges, self._list_sources(due)), []
            for (name, side, old, given), stored in zip(sides, current, strict=True):
                new = stored if number == 0 else None
                if number in entering - {0}:
                    table = self._find_table(layer, name, side)
                    some = given[: self._stored(fmt)]
                    new = side.codec.encode(NewTokens(some, side.bits, *blocks, table))
                codes.append(_follow(side, old, new, move))
            planes.append(self._join(layer, fmt, plane_rows, codes[0], codes[1]))
        settled = (change.layout, store.formats, tuple(planes), placed.after, self._dtype)
        return PackedStore(*settled, state=change.state)

    def free_layer(self, store: PackedStore) -> None:
        """Record the decoded bytes of a layer; planes are freed with their last reference."""
        self._record_decoded(store)

    def find_rebuild_peak(self, before: int, after: int) -> int:
        """Return the sum of both sizes: all new planes are made before the old ones are freed."""
        return before + after

    def attend(self, store: PackedStore, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Attend over a layer's past, decoded in pieces, and the whole present.

        For a method that reads data the past is decoded once, for attention and for the method.
        """
        queries, keys, values = (self._fold(x) for x in (q, k, v))
        if self._method.static or q.is_cuda:
            out, lse = self._attend_pieces(store, queries, keys, values)
        else:
            out, lse = ragged_attention(queries, keys, values, store.past, self._spec.logit_scale)
        return out.reshape(q.shape), None if lse is None else lse.reshape(q.shape[:3])

    def attend_step(
        self, store: PackedStore, q: Tensor, k: Tensor, v: Tensor, length: int, filled: Tensor
    ) -> Tensor:
        """Attend with the next tokens of a causal segment, which stay in 16 bits until it is full."""
        shape, before, tokens = q.shape, store.filled, k.shape[2]
        q, k, v = (self._fold(x) for x in (q, k, v))
        if store.pending is None:
            buffer = (*k.shape[:2], length, k.shape[3])
            store.pending = (k.new_empty(buffer), v.new_empty(buffer))
        seen = []
        for pending, new in zip(store.pending, (k, v), strict=True):
            pending[:, :, before : before + tokens] = new
            seen.append(pending[:, :, : before + tokens])
        if tokens == 1 or not before:
            return self._attend_pieces(store, q, seen[0], seen[1], causal=tokens > 1)[0].reshape(shape)
        queries = q.unflatten(2, (-1, tokens))
        out = []
        for token in range(tokens):
            keys, values = (part[:, :, : before + token + 1] for part in seen)
            out.append(self._attend_pieces(store, queries[:, :, :, token], keys, values)[0])
        return torch.stack(out, 3).reshape(shape)

    def fill(self, store: PackedStore, k: Tensor, v: Tensor) -> None:
        store.pending = (self._fold(k), self._fold(v))

    def view_pending(self, store: PackedStore, length: int) -> tuple[Tensor, Tensor]:
        assert store.pending is not None
        keys, values = (x.reshape(-1, self._spec.heads, *x.shape[2:]) for x in store.pending)
        return keys, values

    def _fold(self, x: Tensor) -> Tensor:
        """Turn [S, H, tokens, D] into rows [B, R, tokens, D]."""
        return fold_rows(x, self._batch, self._rows)

    def _attend_pieces(
        self, store: PackedStore, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend in pieces of sequences that are decoded together.

        On CUDA nothing is decoded: kernels attend to each plane in place.
        """
        if q.is_cuda:
            return self._attend_planes(store, q, k, v, causal=causal)
        results = []
        for some in self._cut(store):
            self._record_read(store, len(some))
            piece, past = slice(some.start, some.stop), store.read(some)
            out, _ = ragged_attention(
                q[piece], k[piece], v[piece], past, self._spec.logit_scale, causal=causal
            )
            results.append(out)
        return results[0] if len(results) == 1 else torch.cat(results), None

    def _attend_planes(
        self, store: PackedStore, q: Tensor, k: Tensor, v: Tensor, *, causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to the present and the 16-bit plane, then to each plane of codes.

        The output stays float32 until the last plane, so that it is rounded once.
        """
        scale, (first, *others) = self._spec.logit_scale, store.planes
        past = Past(first.keys.data, first.values.data, first.layout)
        coded = [plane for plane in others if plane.layout.total]
        dtype = torch.float32 if coded else q.dtype
        out, lse = ragged_attention(q, k, v, past, scale, causal=causal, dtype=dtype)
        if not coded:
            return out, lse
        assert lse is not None  # always computed on CUDA
        state = out, lse
        for plane in coded:
            state = quantised_attention(q, plane, scale, state)
        return state[0].to(q.dtype), state[1]

    def _place(self, layer: int, store: PackedStore, segment: Segment, change: StorageChange) -> PlaneUpdate:
        """Return planes and indices of slots; equal layers, and generations of a static method, share them."""
        rules = self._forms[layer].rules
        key = (id(change), id(store.placement), id(rules))
        if key in self._known:
            return self._known[key][2]
        placed = place_slots(
            store.placement,
            change.layout,
            change.source,
            segment,
            self._quant_ranges[segment.index],
            self._blocks,
            rules,
        )
        if self._schedule.get((layer, segment.index)) is change:
            self._known[key] = (change, store.placement, placed)
        return placed

    def _join(self, layer: int, fmt: PlaneFormat, plane_rows: PlaneRows, keys: Codes, values: Codes) -> Plane:
        """Return a plane, with the table entry of each code."""
        keys = self._name_entries(layer, "keys", fmt.keys, plane_rows, keys)
        values = self._name_entries(layer, "values", fmt.values, plane_rows, values)
        rotates = fmt.keys.coding != "plain" and layer not in self._spec.unrotated
        rotation = self._read_rotation if rotates else None
        bits = fmt.keys.bits, fmt.values.bits
        return Plane(plane_rows.layout, *bits, keys, values, plane_rows.positions, rotation)

    def _name_entries(
        self, layer: int, name: str, fmt: NumberFormat, plane_rows: PlaneRows, codes: Codes
    ) -> Codes:
        table = self._find_table(layer, name, fmt)
        if fmt.codec.scales == "block":
            return codes._replace(entry=plane_rows.entry)
        if table is None or fmt.codec.levels == "normal":
            return codes._replace(codebook=table)
        head, sources = plane_rows.rows % self._spec.heads, count_sources(self._spec)
        entry = head * sources + self._source[plane_rows.positions]
        return Codes(codes.data, **name_table(table.flatten(0, 1), fmt.bits), entry=entry.int())

    def _find_table(self, layer: int, name: str, fmt: NumberFormat) -> Tensor | None:
        """Return the static table of keys or values: the layer's codebooks, levels of rotated vectors, or None."""
        if fmt.codec.levels == "fitted":
            return self._codebooks[f"{name}_{fmt.bits}"][layer]
        return self._levels[fmt.bits] if fmt.codec.levels == "normal" else None

    def _list_sources(self, due: QuantRange) -> list[tuple[int, int]]:
        """Return the source of each run of tokens that are due, and the token after its last."""
        return [
            (source, segment.end - due.start)
            for source, segment in zip(self._sources, self._spec.segments, strict=True)
            if due.start <= segment.start < due.stop
        ]

    def _stored(self, fmt: PlaneFormat) -> int:
        """Return the number of sequences that store a plane."""
        return self._conditional if fmt.shared else self._batch

    def _cut(self, store: PackedStore) -> Iterator[range]:
        """Yield ranges of sequences to decode together, none with both owners and readers of shared tokens."""
        unit = min(len(plane.keys.data) for plane in store.planes)
        some = max(1, min(unit, PIECE_BYTES // max(1, self._count_read(store))))
        for base in range(0, self._batch, unit):
            for start in range(base, base + unit, some):
                yield range(start, min(start + some, base + unit))

    def _count_read(self, store: PackedStore) -> int:
        """Return the bytes of a sequence's decoded keys and values."""
        return store.layout.total * self._spec.head_dim * 2 * self._dtype.itemsize

    def _record_decoded(self, store: PackedStore) -> None:
        if store.decoded is not None:
            self._record_read(store, self._batch)

    def _record_read(self, store: PackedStore, sequences: int) -> None:
        self.max_read_bytes = max(self.max_read_bytes, sequences * self._count_read(store))


def _follow(fmt: NumberFormat, old: Codes, new: Codes | None, move: PlaneMove) -> Codes:
    """Return a plane's kept codes followed by new ones, without static tables and table entries."""

    def follow(name: str, index: Tensor) -> Tensor | None:
        stored: Tensor | None = getattr(old, name)
        return None if stored is None else _gather(stored, getattr(new, name, None), index)

    codes = _gather(old.data, None if new is None else new.data, move.slots)
    scales = {"token": move.slots, "block": move.entries, None: None}[fmt.codec.scales]
    affine = None if scales is None else follow("affine", scales)
    return Codes(codes, affine, gain=follow("gain", move.slots))


def _gather(old: Tensor, new: Tensor | None, index: Tensor) -> Tensor:
    """Select along the second dimension of `old` followed by `new`."""
    dtype = old.dtype
    if dtype == torch.float8_e4m3fn:  # torch has no index_select for float8
        old, new = old.view(torch.uint8), None if new is None else new.view(torch.uint8)
    joined = old if new is None else torch.cat((old, new), 1)
    return joined.index_select(1, index).view(dtype)
