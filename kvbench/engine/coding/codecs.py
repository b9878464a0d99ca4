"""Table of codings: encoder, stored bytes, and the heads and tokens for which each is unsuitable."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.hadamard import encode_rotated
from kvbench.kernels.planes import Codes, encode_channels, encode_tokens
from kvbench.kernels.quantise import encode_affine, encode_codebook, pack, round_fp8

SCALE_BYTES, GAIN_BYTES, ENTRY_BYTES = 4, 2, 4
"""Bytes of a scale with its zero and of a gain, in float16, and of a slot in `Codes.entry`."""


class NewTokens(NamedTuple):
    """Keys or values of new tokens, of which a plane stores some.

    Attributes:
        x: [batch, rows, tokens, D], of the sequences that store the plane.
        bits: bits of a code.
        half: dtype of 16-bit values.
        exists: bool [rows, tokens], tokens that the plane receives.
        edges: tokens at which blocks begin, then the end of the last block.
        sources: source of each run of tokens, and the token after the run.
        table: static table, [H, sources, D, levels] of the layer, or [2^bits] if all channels share one; None without.
    """

    x: Tensor
    bits: int
    half: torch.dtype
    exists: Tensor
    edges: Sequence[int]
    sources: Sequence[tuple[int, int]]
    table: Tensor | None


@dataclass(frozen=True)
class Codec:
    """One way to store keys or values; `CODECS` has all of them.

    Attributes:
        encode: returns the codes of rows x tokens slots, without their table entries.
        dtype: dtype of the stored values; None for 16 bits.
        scales: what has a scale and a zero: each `token`, or each channel of a `block`; None without scales.
        gains: whether each token has a factor.
        token_bytes: bytes of a token besides its codes.
        channel_bytes: bytes that the tokens of a block share, for each channel.
        index_bytes: bytes by which attention finds a token's scales or levels.
        levels: static table of levels: `fitted` to each head, source and channel, or of a `normal` distribution; None
            without. With levels, a segment of a single token stays in 16 bits.
        min_mixed: smallest power of two that must divide the channels of a head.
    """

    encode: Callable[[NewTokens], Codes]
    dtype: torch.dtype | None = torch.uint8
    scales: Literal["token", "block"] | None = None
    gains: bool = False
    token_bytes: int = 0
    channel_bytes: int = 0
    index_bytes: int = 0
    levels: Literal["fitted", "normal"] | None = None
    min_mixed: int = 1

    def make_empty(self, bits: int, batch: int, channels: int, half: torch.dtype, on: torch.device) -> Codes:
        """Return keys or values of a plane without slots, as from `encode`."""
        dtype = self.dtype or half
        empty = torch.empty(batch, 0, channels * bits // (8 * dtype.itemsize), dtype=dtype, device=on)
        width = {"token": 1, "block": channels, None: None}[self.scales]
        affine = None if width is None else empty.new_empty(batch, 0, width, 2, dtype=torch.float16)
        gain = empty.new_empty(batch, 0, dtype=torch.float16) if self.gains else None
        return Codes(empty, affine, gain=gain)


def _encode_half(new: NewTokens) -> Codes:
    return Codes(new.x.flatten(1, 2).to(new.half))


def _encode_fp8(new: NewTokens) -> Codes:
    return Codes(round_fp8(new.x.flatten(1, 2)))


def _encode_by_channel(new: NewTokens) -> Codes:
    return encode_channels(new.x, new.exists, new.edges, new.bits)


def _encode_by_token(new: NewTokens) -> Codes:
    return encode_tokens(new.x.flatten(1, 2), new.bits)


def _encode_by_codebook(new: NewTokens) -> Codes:
    assert new.table is not None
    return Codes(encode_static(new.x, new.table, new.sources, new.bits))


def _encode_rotated(new: NewTokens) -> Codes:
    assert new.table is not None
    codes, gain = encode_rotated(new.x.flatten(1, 2), new.table)
    return Codes(codes, gain=gain)


Coding = Literal["plain", "fp8", "channel", "token", "codebook", "rotated"]
CODECS: Mapping[Coding, Codec] = {
    "plain": Codec(_encode_half, dtype=None),
    "fp8": Codec(_encode_fp8, dtype=torch.float8_e4m3fn),
    "channel": Codec(_encode_by_channel, scales="block", channel_bytes=SCALE_BYTES, index_bytes=ENTRY_BYTES),
    "token": Codec(_encode_by_token, scales="token", token_bytes=SCALE_BYTES),
    "codebook": Codec(_encode_by_codebook, index_bytes=ENTRY_BYTES, levels="fitted"),
    # Values of rotated vectors with fewer channels are far from normal.
    "rotated": Codec(_encode_rotated, gains=True, token_bytes=GAIN_BYTES, levels="normal", min_mixed=16),
}
"""Codings by name, as `StorageConfig` chooses them, and `plain` for 16-bit values."""


def encode_static(x: Tensor, codebook: Tensor, sources: Sequence[tuple[int, int]], bits: int) -> Tensor:
    """Encode [batch, rows, tokens, D] by the tables [H, sources, D, levels] of each row's head and token's source."""
    codes, start = [], 0
    for source, stop in sources:
        table, some = codebook[:, source].repeat(x.shape[1] // len(codebook), 1, 1), x[:, :, start:stop]
        codes.append(encode_affine(some, table[:, None], bits) if bits == 8 else encode_codebook(some, table))
        start = stop
    return pack(torch.cat(codes, 2).flatten(1, 2), bits)


def name_table(table: Tensor, bits: int) -> dict[str, Tensor]:
    """Return a static table [entries, D, levels] as the keyword of `Codes`."""
    return {"affine": table[None]} if bits == 8 else {"codebook": table}
