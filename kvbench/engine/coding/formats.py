"""Number formats of planes: their choice, their static codebooks, and the encoding of new tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec, Segment
from kvbench.core.storage import ROTATED_BITS, Precision, StorageConfig, find_stored_bits
from kvbench.engine.coding.planes import PlaneRules
from kvbench.kernels.hadamard import MIN_MIXED, count_mixed, encode_rotated
from kvbench.kernels.planes import Codes, encode_channels, encode_levels, encode_tokens
from kvbench.kernels.quantise import round_fp8
from kvbench.methods.shared.base import Method

CODEBOOK_REVISION = 1
"""Increased when the same codebooks store other numbers, so that old runs and calibrations are not reused."""

Coding = Literal["plain", "fp8", "channel", "token", "codebook", "rotated"]
CodebookTensors = Mapping[str, Tensor]
"""Codebooks by name (`keys_4`, `values_2`): levels [L, H, sources, D, 2^bits]; for 8 bits scale and zero [..., 2]."""
SCALE_BYTES = 4
"""Bytes of a float16 scale and its float16 zero."""
TOKEN_BYTES = {"token": SCALE_BYTES, "rotated": 2}
"""Bytes that each token's key or value takes besides its codes: scale and zero, or gain."""

ENTRY_CODINGS = ("channel", "codebook")
"""Codings whose slots share table entries; `Codes.entry` has the entry of each slot."""
ENTRY_BYTES, POSITION_BYTES = 4, 8
"""Bytes of a slot in `Codes.entry` and in `Plane.positions`."""


@dataclass(frozen=True)
class Packing:
    """Low-bit storage settings of a cache.

    Attributes:
        bits: bits of a number, unless the method sets precisions.
        storage: coding of the numbers, unless the method sets precisions; its own bits have precedence.
        fp8: numbers of 8 bits are float8, not codes.
    """

    bits: int
    storage: StorageConfig
    fp8: bool = False

    def __post_init__(self) -> None:
        for name, coding, bits in (
            ("key", self.storage.keys, self.key_bits),
            ("value", self.storage.values, self.value_bits),
        ):
            if coding == "rotated" and bits not in (16, *ROTATED_BITS):
                choices = ", ".join(map(str, ROTATED_BITS))
                raise ConfigError(
                    f"storage.{name}s=rotated: codes have {choices} bits, not the {bits} of cache_dtype; "
                    f"set storage.{name}_bits=4"
                )

    @property
    def key_bits(self) -> int:
        """Bits of one number of a key."""
        return 8 if self.storage.keys == "fp8" else self.storage.key_bits or self.bits

    @property
    def value_bits(self) -> int:
        """Bits of one number of a value."""
        return 8 if self.storage.values == "fp8" else self.storage.value_bits or self.bits

    def check(self, spec: ModelSpec) -> None:
        """Check the settings against the shapes of a model.

        Raises:
            ConfigError: rotated heads have too few channels, or all layers would be exempt.
        """
        storage, mixed = self.storage, count_mixed(spec.head_dim)
        for key, coding in (("keys", storage.keys), ("values", storage.values)):
            if coding == "rotated" and mixed < MIN_MIXED:
                raise ConfigError(
                    f"storage.{key}=rotated: the largest power of two that divides the {spec.head_dim} channels of a "
                    f"head of {spec.name} is {mixed}, and rotation needs {MIN_MIXED}; set storage.{key}=token"
                )
        if storage.exempt and 2 * storage.exempt >= spec.layers:
            raise ConfigError(
                f"storage.exempt={storage.exempt}: all {spec.layers} layers of {spec.name} would stay in 16 bits; "
                f"set at most {(spec.layers - 1) // 2}"
            )

    def exempts(self, layer: int, layers: int) -> bool:
        """Return whether a layer of a model of `layers` layers stays in 16 bits."""
        return not self.storage.exempt <= layer < layers - self.storage.exempt


class NumberFormat(NamedTuple):
    """Bits and coding of keys or of values."""

    bits: int = 16
    coding: Coding = "plain"


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
        return sum(channels * side.bits // 8 + TOKEN_BYTES.get(side.coding, 0) for side in sides)

    def count_block_bytes(self, channels: int) -> int:
        """Return the bytes of the scales that the tokens of one block share."""
        return channels * SCALE_BYTES * [self.keys.coding, self.values.coding].count("channel")

    def count_index_bytes(self, *, rotates: bool) -> int:
        """Return the bytes by which attention finds a token's scales or codebooks, and its rotation if it `rotates`."""
        entries = sum(ENTRY_BYTES for side in (self.keys, self.values) if side.coding in ENTRY_CODINGS)
        return entries + (POSITION_BYTES if rotates and self.keys.coding != "plain" else 0)

    def find_min_tokens(self, channels: int) -> int:
        """Return the smallest block, in tokens, that takes fewer bytes than in 16 bits; 2^30 if none does."""
        if self.shared:
            return 1
        saved = PlaneFormat().count_token_bytes(channels) - self.count_token_bytes(channels)
        return floor(self.count_block_bytes(channels) / saved) + 1 if saved > 0 else 1 << 30


def choose_format(packing: Packing, precision: Precision | None, segment: Segment) -> PlaneFormat:
    """Return the format of a segment's tokens in a precision; None for the run's own."""
    if precision is not None:
        bits = find_stored_bits(precision.bits, segment.length)
        side = NumberFormat() if bits == 16 else NumberFormat(bits, "codebook")
        return PlaneFormat(side, side, precision.shared)
    if packing.fp8:
        return PlaneFormat(NumberFormat(8, "fp8"), NumberFormat(8, "fp8"))
    storage = packing.storage

    def choose(bits: int, coding: Coding) -> NumberFormat:
        stored = find_stored_bits(bits, segment.length) if storage.has_fixed_levels else bits
        return NumberFormat() if stored == 16 else NumberFormat(stored, coding)

    return PlaneFormat(choose(packing.key_bits, storage.keys), choose(packing.value_bits, storage.values))


def count_sources(spec: ModelSpec) -> int:
    """Return the number of sources with their own codebooks: cached scales, or the prompt and what follows it."""
    return len(spec.segments) - 1 if spec.family == "next-scale" else 2


class LayerFormat(NamedTuple):
    """Storage formats of a layer's tokens.

    Attributes:
        formats: formats of its planes; the first holds 16-bit numbers.
        rules: assignment of tokens to planes.
        planes: planes that take any tokens of each segment.
    """

    formats: tuple[PlaneFormat, ...]
    rules: PlaneRules
    planes: tuple[frozenset[int], ...]

    def list_planes(self, spec: ModelSpec, start: int, stop: int) -> frozenset[int]:
        """Return the planes that take any token at positions from `start` to before `stop`."""
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
            own = method.precisions(layer, segment) if precise and not segment.last else None
            precisions: Sequence[Precision | None] = [None] * spec.heads if own is None else own
            rows.append(tuple(choose_format(packing, precision, segment) for precision in precisions))
        if packing.exempts(layer, spec.layers):
            rows = [(PlaneFormat(),) * spec.heads for _ in rows]
        wanted = tuple(rows)
        if wanted not in known:
            formats = (PlaneFormat(), *sorted({fmt for row in wanted for fmt in row} - {PlaneFormat()}))
            numbers = [[formats.index(fmt) for fmt in row] for row in wanted]
            min_tokens = torch.tensor([fmt.find_min_tokens(spec.head_dim) for fmt in formats], device=device)
            rules = PlaneRules(torch.tensor(numbers, device=device).T.contiguous(), min_tokens)
            known[wanted] = LayerFormat(formats, rules, tuple(frozenset(row) for row in numbers))
        layers.append(known[wanted])
    return layers


class Tokens(NamedTuple):
    """Which tokens of all rows of a layer a plane receives.

    Attributes:
        exists: bool [rows, tokens], tokens that a plane receives.
        edges: tokens at which blocks begin, then the end of the last block.
        sources: source of each run of tokens, and the end of the run.
    """

    exists: Tensor
    edges: Sequence[int]
    sources: Sequence[tuple[int, int]]


def encode(fmt: NumberFormat, x: Tensor, tokens: Tokens, table: Tensor | None, half: torch.dtype) -> Codes:
    """Encode keys or values of new tokens for a plane, without the table entries of codes.

    Args:
        fmt: number format of the plane's keys or values.
        x: [batch, rows, tokens, D], of the sequences that store the plane.
        tokens: blocks and sources of the tokens.
        table: [H, sources, D, levels] of the layer for codebooks, levels [2^bits] of rotated vectors; None for other
            codings.
        half: dtype of numbers in 16 bits.

    Returns:
        Codes of rows x tokens slots.
    """
    if fmt.coding == "channel":
        return encode_channels(x, tokens.exists, tokens.edges, fmt.bits)
    if fmt.coding == "codebook":
        assert table is not None
        return Codes(encode_static(x, table, tokens.sources, fmt.bits))
    x = x.flatten(1, 2)
    if fmt.coding == "token":
        return encode_tokens(x, fmt.bits)
    if fmt.coding == "rotated":
        assert table is not None
        numbers, gain = encode_rotated(x, table)
        return Codes(numbers, gain=gain)
    return Codes(round_fp8(x) if fmt.coding == "fp8" else x.to(half))


def encode_static(x: Tensor, book: Tensor, sources: Sequence[tuple[int, int]], bits: int) -> Tensor:
    """Encode [batch, rows, tokens, D] by the tables [H, sources, D, levels] of each row's head and token's source."""
    rows, parts, start = x.shape[1], [], 0
    for source, stop in sources:
        table = book[:, source].repeat(rows // len(book), 1, 1)
        packed = encode_levels(x[:, :, start:stop], table, bits)
        parts.append(packed.unflatten(1, (rows, stop - start)))
        start = stop
    return torch.cat(parts, 2).flatten(1, 2)


def name_table(table: Tensor, bits: int) -> dict[str, Tensor]:
    """Return a static table [entries, D, levels] as the keyword of `Codes`."""
    return {"affine": table[None]} if bits == 8 else {"book": table}


def make_empty(
    fmt: NumberFormat, batch: int, channels: int, half: torch.dtype, device: torch.device
) -> Codes:
    """Return keys or values of a plane without slots, without table entries as from `encode`."""
    dtype = {"plain": half, "fp8": torch.float8_e4m3fn}.get(fmt.coding, torch.uint8)
    width = channels * fmt.bits // (8 * dtype.itemsize)
    numbers = torch.empty(batch, 0, width, dtype=dtype, device=device)
    shared = {"token": 1, "channel": channels}.get(fmt.coding)
    affine = None if shared is None else numbers.new_empty(batch, 0, shared, 2, dtype=torch.float16)
    gain = numbers.new_empty(batch, 0, dtype=torch.float16) if fmt.coding == "rotated" else None
    return Codes(numbers, affine, gain=gain)


def wants_books(packing: Packing, method: Method) -> bool:
    """Return whether the storage or the method's precisions need static codebooks."""
    return method.uses.precisions or (packing.bits < 16 and not packing.fp8 and packing.storage.calibrated)
