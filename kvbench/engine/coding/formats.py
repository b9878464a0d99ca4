"""Number formats of planes: their choice, their static codebooks, and the encoding of new tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, Segment
from kvbench.core.storage import Precision, StorageConfig, find_stored_bits
from kvbench.engine.coding.planes import PlaneRules
from kvbench.kernels.planes import (
    Codes,
    decode,
    encode_channels,
    encode_levels,
    encode_tokens,
    rotate,
    unrotate,
)
from kvbench.kernels.quantise import round_fp8
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.capabilities import mixes_precisions

CODEBOOK_REVISION = 1
"""Raised when the same codebooks come to store other numbers, so that earlier runs and calibrations are not reused."""

Coding = Literal["plain", "fp8", "channel", "token", "codebook"]
Books = Mapping[str, Tensor]
"""By `keys_4`, `values_2`, ...: levels [L, H, sources, D, 2^bits]; of 8 bits scale and zero [L, H, sources, D, 2]."""
SCALE_BYTES = 4
"""Bytes of a scale and a zero."""


@dataclass(frozen=True)
class Packing:
    """Low-bit storage settings of a cache.

    Attributes:
        bits: of a number, unless the method has forms of its own.
        storage: how codes are made, unless it has.
        fp8: numbers of 8 bits are float8, not codes.
    """

    bits: int
    storage: StorageConfig
    fp8: bool = False


class PlaneFormat(NamedTuple):
    """Number format of a plane.

    Attributes:
        bits: of a number.
        keys: how keys are coded.
        values: how values are coded.
        shared: conditional sequences alone store it; their unconditional twins read it.
    """

    bits: int = 16
    keys: Coding = "plain"
    values: Coding = "plain"
    shared: bool = False

    def count_token_bytes(self, channels: int) -> int:
        """Return the bytes of one token in one head, without what a block's channels share."""
        per_token = [self.keys, self.values].count("token")
        return 2 * channels * self.bits // 8 + per_token * SCALE_BYTES

    def count_block_bytes(self, channels: int) -> int:
        """Return the bytes of what the tokens of one block share."""
        return channels * SCALE_BYTES if self.keys == "channel" else 0

    def find_min_tokens(self, channels: int) -> int:
        """Return the fewest tokens of a block that take fewer bytes than in 16 bits; 2^30 if none do."""
        if self.shared:
            return 1
        saved = PlaneFormat().count_token_bytes(channels) - self.count_token_bytes(channels)
        return floor(self.count_block_bytes(channels) / saved) + 1 if saved > 0 else 1 << 30


def choose_format(packing: Packing, form: Precision | None, at: Segment) -> PlaneFormat:
    """Return what tokens of a segment are stored as in a form; None stands for the run's own."""
    if form is not None:
        bits = find_stored_bits(form.bits, at.length)
        how: Coding = "plain" if bits == 16 else "codebook"
        return PlaneFormat(bits, how, how, form.shared)
    if packing.fp8:
        return PlaneFormat(8, "fp8", "fp8")
    storage = packing.storage
    bits = find_stored_bits(packing.bits, at.length) if storage.calibrated else packing.bits
    return PlaneFormat() if bits == 16 else PlaneFormat(bits, storage.keys, storage.values)


def count_sources(spec: ModelSpec) -> int:
    """Return how many sources have codebooks of their own: all cached scales; prompt and image or text of others."""
    return len(spec.segments) - 1 if spec.family == "next-scale" else 2


class LayerFormat(NamedTuple):
    """Storage formats of a layer's tokens.

    Attributes:
        formats: of its planes; the first one is numbers in 16 bits.
        rules: which plane takes which tokens.
        planes: of each segment, the numbers of the planes that take any of its tokens.
    """

    formats: tuple[PlaneFormat, ...]
    rules: PlaneRules
    planes: tuple[frozenset[int], ...]

    def list_planes(self, spec: ModelSpec, start: int, stop: int) -> frozenset[int]:
        """Return the planes that take any token at positions from `start` to before `stop`."""
        some = [self.planes[at.index] for at in spec.segments if start <= at.start < stop]
        return frozenset().union(*some)


def list_layer_formats(
    spec: ModelSpec, method: Method, packing: Packing, device: torch.device | str
) -> list[LayerFormat]:
    """Return how every layer's tokens are stored; layers that are alike have one object."""
    known: dict[tuple[tuple[PlaneFormat, ...], ...], LayerFormat] = {}
    found = []
    for layer in range(spec.layers):
        rows = []
        for at in spec.segments:
            forms = method.precisions(layer, at) if mixes_precisions(method) and not at.last else None
            each: Sequence[Precision | None] = [None] * spec.heads if forms is None else forms
            rows.append(tuple(choose_format(packing, form, at) for form in each))
        wanted = tuple(rows)
        if wanted not in known:
            formats = (PlaneFormat(), *sorted({fmt for row in wanted for fmt in row} - {PlaneFormat()}))
            numbers = [[formats.index(fmt) for fmt in row] for row in wanted]
            min_tokens = torch.tensor([fmt.find_min_tokens(spec.head_dim) for fmt in formats], device=device)
            rules = PlaneRules(torch.tensor(numbers, device=device).T.contiguous(), min_tokens)
            known[wanted] = LayerFormat(formats, rules, tuple(frozenset(row) for row in numbers))
        found.append(known[wanted])
    return found


class Tokens(NamedTuple):
    """New tokens of all rows of a layer.

    Attributes:
        keys: [batch, rows, tokens, D].
        values: shaped like keys.
        unrotated: keys before the rotation, even channels first, which codes are made of; None where keys are.
        exists: bool [rows, tokens], those that a plane gets.
        edges: tokens at which blocks begin, and the one after the last of them.
        sources: source of each run of tokens, and the token after its last.
    """

    keys: Tensor
    values: Tensor
    unrotated: Tensor | None
    exists: Tensor
    edges: Sequence[int]
    sources: Sequence[tuple[int, int]]

    def take(self, sequences: int) -> "Tokens":
        """Return those of the first sequences."""
        unrotated = None if self.unrotated is None else self.unrotated[:sequences]
        return self._replace(keys=self.keys[:sequences], values=self.values[:sequences], unrotated=unrotated)


def encode(
    fmt: PlaneFormat, tokens: Tokens, books: tuple[Tensor, Tensor] | None, half: torch.dtype
) -> tuple[Codes, Codes]:
    """Encode new tokens for a plane; which entry is whose is left open.

    Args:
        fmt: of the plane.
        tokens: of the sequences that store it.
        books: tables of keys and values of the layer [H, sources, D, levels], where the format wants them.
        half: dtype of numbers in 16 bits.

    Returns:
        Keys and values of rows x tokens slots.
    """
    found = []
    keys = tokens.keys if tokens.unrotated is None or fmt.keys == "plain" else tokens.unrotated
    for number, (how, x) in enumerate(((fmt.keys, keys), (fmt.values, tokens.values))):
        if how == "plain":
            codes = Codes(x.flatten(1, 2).to(half))
        elif how == "fp8":
            codes = Codes(round_fp8(x.flatten(1, 2)))
        elif how == "token":
            codes = encode_tokens(x.flatten(1, 2), fmt.bits)
        elif how == "channel":
            codes = encode_channels(x, tokens.exists, tokens.edges, fmt.bits)
        else:
            assert books is not None
            codes = Codes(_encode_static(x, books[number], tokens.sources, fmt.bits))
        found.append(codes)
    return found[0], found[1]


def _encode_static(x: Tensor, book: Tensor, sources: Sequence[tuple[int, int]], bits: int) -> Tensor:
    """Encode [batch, rows, tokens, D] by the tables [H, sources, D, levels] of each row's head and token's source."""
    rows, parts, start = x.shape[1], [], 0
    for source, stop in sources:
        table = book[:, source].repeat(rows // len(book), 1, 1)
        packed = encode_levels(x[:, :, start:stop], table, bits)
        parts.append(packed.unflatten(1, (rows, stop - start)))
        start = stop
    return torch.cat(parts, 2).flatten(1, 2)


def read_back(
    keys: Tensor, values: Tensor, bits: int, segment: int, books: Books, rotation: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return keys and values of a segment as they would be read out of static codebooks, in their dtype.

    Args:
        keys: [batch, rows, tokens, D].
        values: shaped like keys.
        bits: of a number, 16 or fewer.
        segment: index of theirs.
        books: of the layer, [H, sources, D, levels] by name.
        rotation: complex64 [tokens, D/2], what neighbouring channels of keys were multiplied by; None if by nothing.
    """
    half = keys.dtype if keys.dtype.itemsize == 2 else torch.float16
    if find_stored_bits(bits, keys.shape[2]) == 16:
        return keys.to(half).to(keys.dtype), values.to(half).to(values.dtype)
    shape, dtype = keys.shape[1:3], keys.dtype
    found = []
    for name, x in (("keys", keys if rotation is None else unrotate(keys, rotation)), ("values", values)):
        book = books[f"{name}_{bits}"]
        source = min(segment, book.shape[1] - 1)
        numbers = _encode_static(x, book, [(source, shape[1])], bits)
        entry = torch.arange(shape[0], device=x.device).repeat_interleave(shape[1]) % len(book)
        codes = Codes(numbers, **name_table(book[:, source], bits), entry=entry)
        found.append(decode(codes, bits).unflatten(1, shape))
    if rotation is not None:
        found[0] = rotate(found[0], rotation)
    return found[0].to(dtype), found[1].to(dtype)


def name_table(table: Tensor, bits: int) -> dict[str, Tensor]:
    """Return a static table [entries, D, levels] under the name that `Codes` has for it."""
    return {"affine": table[None]} if bits == 8 else {"book": table}


def make_empty(
    fmt: PlaneFormat, batch: int, channels: int, half: torch.dtype, device: torch.device
) -> tuple[Codes, Codes]:
    """Return keys and values of a plane without slots, entries left open as `encode` leaves them."""
    found = []
    for how in (fmt.keys, fmt.values):
        dtype = {"plain": half, "fp8": torch.float8_e4m3fn}.get(how, torch.uint8)
        width = channels if how in ("plain", "fp8") else channels * fmt.bits // 8
        numbers = torch.empty(batch, 0, width, dtype=dtype, device=device)
        shared = {"token": 1, "channel": channels}.get(how)
        affine = None if shared is None else numbers.new_empty(batch, 0, shared, 2, dtype=torch.float16)
        found.append(Codes(numbers, affine))
    return found[0], found[1]


def wants_books(packing: Packing, method: Method) -> bool:
    """Return whether static codebooks are needed: by the storage, or by a method with forms of its own."""
    return mixes_precisions(method) or (packing.bits < 16 and not packing.fp8 and packing.storage.calibrated)
