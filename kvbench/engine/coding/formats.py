"""Number formats of planes, and their choice for each segment and head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec, Segment
from kvbench.core.storage import CODING_BITS, LEVELS, StorageConfig
from kvbench.engine.coding.codecs import CODECS, Codec, Coding
from kvbench.engine.coding.planes import PlaneRules
from kvbench.kernels.hadamard import count_mixed
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.precision import Precision, find_stored_bits

CODEBOOK_REVISION = 1
"""Incremented when equal codebooks store other values; part of the identity of runs and calibrations."""

CodebookTensors = Mapping[str, Tensor]
"""Codebooks by name (`keys_4`, `values_2`): levels [L, H, sources, D, 2^bits]; for 8 bits scale and zero [..., 2]."""
POSITION_BYTES = 8
"""Bytes of a slot in `Plane.positions`."""


class NumberFormat(NamedTuple):
    """Bits and coding of keys or of values."""

    bits: int = 16
    coding: Coding = "plain"

    @property
    def codec(self) -> Codec:
        """Entry of `CODECS` for the coding, which says what is stored."""
        return CODECS[self.coding]


@dataclass(frozen=True)
class Packing:
    """Low-bit storage settings of a cache.

    Attributes:
        bits: bits per value, unless the method sets precisions.
        storage: coding of keys and values, likewise; its `key_bits` and `value_bits` override `bits`.
        fp8: whether 8-bit values are float8, not codes.
    """

    bits: int
    storage: StorageConfig
    fp8: bool = False

    def __post_init__(self) -> None:
        for name, side in zip(("key", "value"), self.sides, strict=True):
            if side.bits not in (choices := CODING_BITS.get(side.coding, LEVELS)):
                few = ", ".join(str(bits) for bits in choices if bits < 16)
                raise ConfigError(
                    f"storage.{name}s={side.coding}: codes have {few} bits, not the {side.bits} of cache_dtype; set "
                    f"storage.{name}_bits=4"
                )

    @property
    def sides(self) -> tuple[NumberFormat, NumberFormat]:
        """Formats of keys and of values, except for those that stay in 16 bits."""
        storage = self.storage
        keys, values = (
            NumberFormat(8, "fp8") if self.fp8 or coding == "fp8" else NumberFormat(bits or self.bits, coding)
            for coding, bits in ((storage.keys, storage.key_bits), (storage.values, storage.value_bits))
        )
        return keys, values

    def check(self, spec: ModelSpec) -> None:
        """Check the settings against the shapes of a model.

        Raises:
            ConfigError: rotated heads have too few channels, or all layers would be exempt.
        """
        storage, mixed = self.storage, count_mixed(spec.head_dim)
        for key, side in zip(("keys", "values"), self.sides, strict=True):
            if mixed < (needed := side.codec.min_mixed):
                raise ConfigError(
                    f"storage.{key}={side.coding}: the largest power of two that divides the {spec.head_dim} channels "
                    f"of a head of {spec.name} is {mixed}, and rotation needs {needed}; set storage.{key}=token"
                )
        if storage.exempt and 2 * storage.exempt >= spec.layers:
            raise ConfigError(
                f"storage.exempt={storage.exempt}: all {spec.layers} layers of {spec.name} would stay in 16 bits; "
                f"set at most {(spec.layers - 1) // 2}"
            )

    def exempts(self, layer: int, layers: int) -> bool:
        """Return whether a layer of a model of `layers` layers stays in 16 bits."""
        return not self.storage.exempt <= layer < layers - self.storage.exempt


class PlaneFormat(NamedTuple):
    """Number formats of a plane.

    Attributes:
        keys: number format of keys.
        values: number format of values.
        shared: only conditional sequences store the plane; the unconditional ones read it.
    """

    keys: NumberFormat = NumberFormat()
    values: NumberFormat = NumberFormat()
    shared: bool = False

    def count_token_bytes(self, channels: int) -> int:
        """Return the bytes of one token in one head, without the scales of its block."""
        sides = self.keys, self.values
        return sum(channels * side.bits // 8 + side.codec.token_bytes for side in sides)

    def count_block_bytes(self, channels: int) -> int:
        """Return the bytes of the scales that the tokens of one block share."""
        return channels * (self.keys.codec.channel_bytes + self.values.codec.channel_bytes)

    def count_index_bytes(self, *, rotates: bool) -> int:
        """Return the bytes by which attention finds a token's scales or codebooks, and its rotation if `rotates`."""
        entries = self.keys.codec.index_bytes + self.values.codec.index_bytes
        return entries + (POSITION_BYTES if rotates and self.keys.coding != "plain" else 0)

    def find_min_tokens(self, channels: int) -> int:
        """Return the smallest block, in tokens, that takes fewer bytes than in 16 bits; 2^30 if none does."""
        if self.shared:
            return 1
        saved = PlaneFormat().count_token_bytes(channels) - self.count_token_bytes(channels)
        return floor(self.count_block_bytes(channels) / saved) + 1 if saved > 0 else 1 << 30


def choose_format(packing: Packing, precision: Precision | None, segment: Segment) -> PlaneFormat:
    """Return the format of a segment's tokens; `precision` None stands for the run's own format."""
    sides = packing.sides if precision is None else (NumberFormat(precision.bits, "codebook"),) * 2
    has_levels = any(side.codec.levels for side in sides)

    def choose(side: NumberFormat) -> NumberFormat:
        bits = find_stored_bits(side.bits, segment.length) if has_levels else side.bits
        return NumberFormat() if bits == 16 else side

    keys, values = map(choose, sides)
    return PlaneFormat(keys, values, precision is not None and precision.shared)


def count_sources(spec: ModelSpec) -> int:
    """Return the number of sources with their own codebooks: cached scales, or the prompt and all later tokens."""
    return len(spec.segments) - 1 if spec.family == "next-scale" else 2


class LayerFormat(NamedTuple):
    """Storage formats of a layer's tokens.

    Attributes:
        formats: formats of its planes; the first holds 16-bit values.
        rules: assignment of tokens to planes.
        planes: planes that receive tokens of each segment, [K].
    """

    formats: tuple[PlaneFormat, ...]
    rules: PlaneRules
    planes: tuple[frozenset[int], ...]

    def list_planes(self, spec: ModelSpec, start: int, stop: int) -> frozenset[int]:
        """Return the planes that receive any token at positions from `start` to before `stop`."""
        segments = (segment for segment in spec.segments if start <= segment.start < stop)
        return frozenset().union(*(self.planes[segment.index] for segment in segments))


def list_layer_formats(
    spec: ModelSpec, method: Method, packing: Packing, device: torch.device | str
) -> list[LayerFormat]:
    """Return the storage format of each layer; equal layers have the same object."""
    known: dict[tuple[tuple[PlaneFormat, ...], ...], LayerFormat] = {}
    layers, precise = [], method.uses.precisions
    for layer in range(spec.layers):
        rows = []
        for segment in spec.segments:
            chosen = method.precisions(layer, segment) if precise and not segment.last else None
            precisions: Sequence[Precision | None] = [None] * spec.heads if chosen is None else chosen
            rows.append(tuple(choose_format(packing, precision, segment) for precision in precisions))
        if packing.exempts(layer, spec.layers):
            rows = [(PlaneFormat(),) * spec.heads for _ in rows]
        key = tuple(rows)
        if key not in known:
            formats = (PlaneFormat(), *sorted({fmt for row in key for fmt in row} - {PlaneFormat()}))
            indices = [[formats.index(fmt) for fmt in row] for row in key]
            min_tokens = torch.tensor([fmt.find_min_tokens(spec.head_dim) for fmt in formats], device=device)
            rules = PlaneRules(torch.tensor(indices, device=device).T.contiguous(), min_tokens)
            known[key] = LayerFormat(formats, rules, tuple(frozenset(row) for row in indices))
        layers.append(known[key])
    return layers


def wants_codebooks(packing: Packing, method: Method) -> bool:
    """Return whether the storage or the method's precisions need static codebooks."""
    return method.uses.precisions or any(side.codec.levels == "fitted" for side in packing.sides)
