"""Storage in few bits as its description has it, one token after the other: what tests compare the cache with.

Also dense attention over what it reads back, and random codebooks and rotations for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import erf, exp, inf, pi, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.core.segments import ModelSpec, Segment
from kvbench.core.storage import StorageConfig
from kvbench.methods.shared.precision import Precision
from tests.support.engine import D

Numbers = NDArray[np.float32]
Place = tuple[int, int]
"""Sequence and head."""


@dataclass
class Token:
    """What is stored of a token: both numbers as they are read, bytes without the block's, the block of a key.

    Attention reads `index` more bytes: an int32 for each number with a table of its own, and the position of a key that
    it rotates.
    """

    key: Numbers
    value: Numbers
    bytes: int
    block: tuple[int, int] | None = None
    young: bool = True
    index: int = 0
    sharers: int = 1


@dataclass
class SlowStorage:
    """One layer; keys and values are numbers of one head's token, [D]."""

    spec: ModelSpec
    layer: int
    storage: StorageConfig
    bits: int
    fp8: bool = False
    rotation: Tensor | None = None
    codebooks: Mapping[str, Tensor] | None = None
    forms: Sequence[Sequence[Precision]] | None = None  # of each segment and head
    tokens: dict[Place, dict[int, Token]] = field(default_factory=dict)

    def store(self, k: Tensor, v: Tensor, at: Segment, kept: Mapping[Place, Sequence[int]]) -> None:
        """Take a segment [sequences, heads, tokens, D]; of all positions so far those in `kept` stay."""
        exact: dict[Place, dict[int, tuple[Numbers, Numbers]]] = {}
        for place, positions in kept.items():
            held = self.tokens.setdefault(place, {})
            exact[place] = {}
            for number in range(at.length):
                key, value = (np.array(x[place][number], np.float32) for x in (k, v))
                exact[place][at.start + number] = (key, value)
                half = [x.astype(np.float16).astype(np.float32) for x in (key, value)]
                held[at.start + number] = Token(half[0], half[1], 4 * self.spec.head_dim)
            for position in list(held):
                if position not in positions:
                    del held[position]
        for place in kept:
            for other in self.spec.segments[: at.index + 1]:
                if other.end + self.storage.residual <= at.end:
                    self._store(place, other, exact[place])
        if self.forms is not None:
            self._share(at, len(k) // self.spec.branches)

    def _share(self, at: Segment, prompts: int) -> None:
        """Let the unconditional sequences have what their conditional twins store."""
        assert self.forms is not None
        for (sequence, head), held in self.tokens.items():
            if self.forms[at.index][head].shared and sequence >= prompts:
                twin = self.tokens[sequence - prompts, head]
                for position in [p for p in held if at.start <= p < at.end]:
                    held[position] = twin[position]
                    twin[position].bytes //= self.spec.branches
                    twin[position].sharers = self.spec.branches

    def _store(self, place: Place, segment: Segment, exact: Mapping[int, tuple[Numbers, Numbers]]) -> None:
        bits = self.bits
        if self.forms is not None:
            self.bits = self.forms[segment.index][place[1]].bits
        fixed = "codebook" in self._codings or "rotated" in self._codings
        if fixed and segment.length == 1 and not self.fp8:
            self.bits = 16
        self._quantise(place, segment, exact)
        self.bits = bits

    @property
    def _codings(self) -> tuple[str, str]:
        return self.storage.keys, self.storage.values

    @property
    def _side_bits(self) -> tuple[int, int]:
        """Bits of keys and of values."""
        if self.fp8 or self.bits == 16 or self.forms is not None:
            return self.bits, self.bits
        return self.storage.key_bits or self.bits, self.storage.value_bits or self.bits

    def _quantise(self, place: Place, segment: Segment, exact: Mapping[int, tuple[Numbers, Numbers]]) -> None:
        group, held = self.storage.group or segment.length, self.tokens[place]
        for first in range(segment.start, segment.end, group):
            stop = min(first + group, segment.end)
            block = [p for p in range(first, stop) if p in held and held[p].young]
            for position in block:
                held[position].young = False
            if self.bits == 16 or not block or not self._worth(len(block)):
                continue
            inputs = [exact.get(p, (held[p].key, held[p].value)) for p in block]
            keys, values = (np.stack(part) for part in zip(*inputs, strict=True))
            rotated = self.rotation is not None and self.storage.before_rotation
            if rotated:
                keys = self._turn(keys, block, -1)
            source = min(segment.index, 1) if segment.causal else segment.index
            keys = self._read_back(keys, "keys", place[1], source)
            values = self._read_back(values, "values", place[1], source)
            if rotated:
                keys = self._turn(keys, block, 1)
            for position, key, value in zip(block, keys, values, strict=True):
                of_block = (segment.index, first) if self._block_bytes else None
                tables = 0 if self.fp8 else sum(how in ("channel", "codebook") for how in self._codings)
                index = 4 * tables + 8 * rotated
                held[position] = Token(key, value, self._token_bytes, of_block, young=False, index=index)

    @property
    def _token_bytes(self) -> int:
        codes = self.spec.head_dim * sum(self._side_bits) // 8
        scales = {"token": 4, "rotated": 2}
        return codes + (0 if self.fp8 else sum(scales.get(how, 0) for how in self._codings))

    @property
    def _block_bytes(self) -> int:
        blocks = 0 if self.fp8 else (self.storage.keys, self.storage.values).count("channel")
        return 4 * self.spec.head_dim * blocks

    def _worth(self, tokens: int) -> bool:
        return tokens * self._token_bytes + self._block_bytes < tokens * 4 * self.spec.head_dim

    def _turn(self, keys: Numbers, positions: Sequence[int], sense: int) -> Numbers:
        assert self.rotation is not None
        rotation = self.rotation.numpy()[positions]
        pairs = (keys[:, 0::2] + 1j * keys[:, 1::2]) * (rotation if sense > 0 else rotation.conj())
        rotated = np.empty_like(keys)
        rotated[:, 0::2], rotated[:, 1::2] = pairs.real, pairs.imag
        return rotated

    def _read_back(self, x: Numbers, name: str, head: int, source: int) -> Numbers:
        side = ("keys", "values").index(name)
        how, bits = self._codings[side], self._side_bits[side]
        if self.fp8:
            return torch.tensor(x).clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy()
        if how == "codebook":
            return self._read_codebook(x, name, head, source)
        if how == "rotated":
            return read_rotated(x, bits)
        axis = 0 if how == "channel" else 1
        zero = x.min(axis, keepdims=True).astype(np.float16).astype(np.float32)
        scale = ((x.max(axis, keepdims=True) - zero) / np.float32(2**bits - 1)).clip(0)
        scale = scale.astype(np.float16).astype(np.float32)
        codes = np.rint((x - zero) / np.where(scale > 0, scale, 1)).clip(0, 2**bits - 1)
        return (zero + scale * codes).astype(np.float32)

    def _read_codebook(self, x: Numbers, name: str, head: int, source: int) -> Numbers:
        assert self.codebooks is not None
        table = self.codebooks[f"{name}_{self.bits}"][self.layer, head, source].float().numpy()
        if name == "keys" and self.rotation is not None and self.storage.before_rotation:
            order = np.arange(len(table)).reshape(2, -1).T.ravel()  # of tables whose even channels come first
            table = table[order]
        if self.bits == 8:
            scale, zero = table.T
            return (zero + scale * np.rint((x - zero) / scale).clip(0, 255)).astype(np.float32)
        nearest = np.abs(x[:, :, None] - table).argmin(2)
        return np.take_along_axis(table[None], nearest[:, :, None], 2)[:, :, 0]

    def count_bytes(self, sequence: int, *, read: bool = False) -> int:
        """Bytes of what is stored of a sequence, the scales of each block once; or of what its attention reads."""
        total = 0
        for place, held in self.tokens.items():
            if place[0] == sequence:
                blocks = {token.block for token in held.values() if token.block is not None}
                total += sum(token.bytes for token in held.values()) + len(blocks) * self._block_bytes
                total += read * sum((one.sharers - 1) * one.bytes + one.index for one in held.values())
        return total


EDGES = {
    2: (0.9815988216,),
    3: (0.5005497301, 1.0499572799, 1.7479274915),
    4: (0.2582216647, 0.5224036690, 0.7995497875, 1.0992858269, 1.4371387917, 1.8435318063, 2.4008033988),
}
"""Edges above 0 between the levels of a standard normal number, by bits; a level is the mean of what is between two."""


def read_rotated(x: Numbers, bits: int) -> Numbers:
    """Vectors [tokens, D] as rotated codes give them back; D is a power of two."""
    channels = x.shape[1]
    signs = [[(-1) ** (i & j).bit_count() for j in range(channels)] for i in range(channels)]
    rotation = np.array(signs) / channels**0.5
    levels = make_levels(EDGES[bits])
    rows = []
    for row in x.astype(np.float64):
        norm = np.sqrt((row**2).sum())
        turned = rotation @ row * channels**0.5 / max(norm, 1e-30)
        nearest = levels[np.abs(turned[:, None] - levels).argmin(1)]
        gain = np.float16(norm / np.sqrt((nearest**2).sum()))
        rows.append(rotation @ nearest * np.float64(gain))
    return np.array(rows, np.float32)


def make_levels(edges: Sequence[float]) -> NDArray[np.float64]:
    """Means of a standard normal number between edges, their mirror images and 0."""
    ends = [0.0, *edges, inf]
    half = [
        (exp(-(low**2) / 2) - exp(-(high**2) / 2)) / sqrt(pi / 2) / (erf(high / sqrt(2)) - erf(low / sqrt(2)))
        for low, high in pairwise(ends)
    ]
    return np.array([*(-level for level in reversed(half)), *half])


def make_rotation(spec: ModelSpec) -> Tensor:
    angle = torch.arange(spec.segments[-1].end)[:, None] * torch.linspace(0.1, 1, D // 2)
    return torch.polar(torch.ones_like(angle), angle)


def make_codebooks(spec: ModelSpec) -> dict[str, Tensor]:
    """Random levels, ascending, and scales that reach from -4 to 4."""
    generator = torch.Generator().manual_seed(0)
    shape = (spec.layers, spec.heads, len(spec.segments) - 1 if spec.family == "next-scale" else 2, D)
    codebooks = {}
    for name in ("keys", "values"):
        for bits in (4, 3, 2):
            codebooks[f"{name}_{bits}"] = (
                torch.randn(*shape, 2**bits, generator=generator).sort(-1).values.half()
            )
        codebooks[f"{name}_8"] = torch.tensor([8 / 255, -4]).half().expand(*shape, 2).contiguous()
    return codebooks


def check_attention(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Check attention against that over slow storage, where numbers halfway between two codes may round otherwise."""
    for one, wanted in zip(found, expected, strict=True):
        wrong = (one - wanted).abs() > 2e-4 + 1e-3 * wanted.abs()
        assert wrong.float().mean() < 0.02


def attend_slowly(
    spec: ModelSpec, inputs: list[list[tuple[Tensor, ...]]], seen: Tensor, slow: Mapping[int, SlowStorage]
) -> tuple[list[Tensor], list[list[list[int]]], list[int]]:
    """Attention over what slow storage reads back, with bytes of each layer and sequence after each segment.

    The last are the bytes that the attention of each sequence reads.
    """
    out, held = [], []
    sequences = len(inputs[0][0][0])
    reads = [0] * sequences
    for at, layers in zip(spec.segments, inputs, strict=True):
        for layer, (q, k, v) in enumerate(layers):
            result = torch.empty_like(q)
            reads = [size + slow[layer].count_bytes(s, read=True) for s, size in enumerate(reads)]
            for place in product(range(sequences), range(spec.heads)):
                past = slow[layer].tokens.get(place, {})
                order = sorted(past)
                keys, values = (
                    torch.cat([*(torch.tensor(getattr(past[p], name))[None] for p in order), new[place]])
                    for name, new in (("key", k), ("value", v))
                )
                scores = q[place].double() @ keys.double().T * spec.logit_scale
                if at.causal:
                    later = torch.ones(at.length, at.length).triu(1).bool()
                    scores[:, len(order) :].masked_fill_(later, -torch.inf)
                result[place] = (scores.softmax(-1) @ values.double()).float()
            out.append(result)
        if at.last:
            break
        for layer, (_, k, v) in enumerate(layers):
            kept = {
                place: [p for p in range(at.end) if seen[at.index + 1, layer, place[1], p]]
                for place in product(range(sequences), range(spec.heads))
            }
            slow[layer].store(k, v, at, kept)
        held.append([[slow[layer].count_bytes(s) for s in range(sequences)] for layer in range(spec.layers)])
    return out, held, reads
