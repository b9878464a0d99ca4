"""Quantisation of values to codes of few bits, and packing of codes into bytes.

A code is a step on an affine scale (KIVI, arXiv:2402.02750, Eq. 1) or the index of a codebook level (Lloyd 1982,
doi:10.1109/TIT.1982.1056489). D channels of 8, 4 or 2 bits take W = D bits / 8 bytes: channel c is in byte c % W, from
bit (c // W) bits up, so that one shift decodes a tile of adjacent channels. Codes of 3 bits store their two low bits in
D / 4 bytes, followed by the high bits in D / 8.
"""

import torch
from torch import Tensor

BITS = (8, 4, 3, 2)
"""Supported bits of a code."""
MAX_HALF = 65504.0
"""Largest float16 value; scales and codebooks are stored in float16."""
MAX_FP8 = 448.0
"""Largest float8 e4m3 value."""
ITERATIONS = 24
"""Iterations of Lloyd's algorithm; later ones move levels by less than a hundredth of a step."""


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes uint8 [..., D] below 2^bits into bytes, uint8 [..., D bits / 8]; D is a multiple of 8."""
    if bits == 3:
        return torch.cat((pack(codes & 3, 2), pack(codes >> 2, 1)), -1)
    planes = codes.unflatten(-1, (8 // bits, -1)).unbind(-2)
    packed = planes[0].clone()
    for number, plane in enumerate(planes[1:], 1):
        packed |= plane << (number * bits)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the codes uint8 [..., D] of packed bytes (`pack`)."""
    if bits == 3:
        low, high = packed.tensor_split([2 * (packed.shape[-1] // 3)], -1)
        return unpack(low, 2) | unpack(high, 1) << 2
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    return torch.cat([packed >> shift & mask for shift in range(0, 8, bits)], -1)


def fit_affine(smallest: Tensor, largest: Tensor, bits: int) -> Tensor:
    """Return scale and zero, float16 [..., 2], so that codes span `smallest` to `largest` [...].

    The first code is `smallest` rounded to float16, the last code `largest`; if both are equal the scale is 0. For an
    empty range `smallest` may exceed `largest` (both infinite): scale and zero are 0.
    """
    empty = smallest > largest
    zero = smallest.masked_fill(empty, 0).clamp(-MAX_HALF, MAX_HALF).half()
    top = largest.masked_fill(empty, 0).clamp(-MAX_HALF, MAX_HALF).float()
    scale = ((top - zero.float()) / ((1 << bits) - 1)).clamp(min=0).half()
    return torch.stack((scale, zero), -1)


def encode_affine(x: Tensor, affine: Tensor, bits: int) -> Tensor:
    """Return the nearest codes uint8 [...] of values on the scales `affine` [..., 2] (`fit_affine`)."""
    scale, zero = affine.float().unbind(-1)
    steps = (x.float() - zero) / scale.where(scale > 0, 1)
    return steps.round_().clamp_(0, (1 << bits) - 1).to(torch.uint8)


def decode_affine(codes: Tensor, affine: Tensor) -> Tensor:
    """Decode codes [...] to float32: zero + scale x code."""
    scale, zero = affine.float().unbind(-1)
    return codes.float().mul_(scale).add_(zero)


def fit_codebook(samples: Tensor, bits: int) -> Tensor:
    """Return the Lloyd-Max codebook float16 [..., 2^bits], ascending, of samples [..., n]: least mean square error.

    Levels start at quantiles. Each level moves to the mean of its nearest samples, and stays if it has none.
    """
    x = samples.sort(-1).values.float()
    count, levels = x.shape[-1], 1 << bits
    index = (torch.arange(levels, device=x.device) + 0.5) * (count / levels)
    codebook = x.index_select(-1, index.long().clamp_(max=count - 1))
    sums = torch.nn.functional.pad(x.double().cumsum(-1), (1, 0))
    for _ in range(ITERATIONS):
        middle = (codebook[..., 1:] + codebook[..., :-1]) / 2
        cuts = torch.nn.functional.pad(torch.searchsorted(x, middle.contiguous()), (1, 1))
        cuts[..., -1] = count
        counts = cuts.diff(dim=-1)
        means = sums.gather(-1, cuts).diff(dim=-1) / counts.clamp(min=1)
        codebook = torch.where(counts > 0, means.float(), codebook)
    return codebook.clamp_(-MAX_HALF, MAX_HALF).half()


def encode_codebook(x: Tensor, codebook: Tensor) -> Tensor:
    """Return the index uint8 [..., tokens, D] of the level nearest to x, of ascending `codebook` [..., D, levels]."""
    levels = codebook.float()
    middle = ((levels[..., 1:] + levels[..., :-1]) / 2).unsqueeze(-3)
    x = x.float()
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for edge in middle.unbind(-1):  # without an array of all distances
        codes += x > edge
    return codes


def decode_codebook(codes: Tensor, codebook: Tensor, entry: Tensor) -> Tensor:
    """Return the levels of codes, float32 [..., slots, D].

    Args:
        codes: uint8 [..., slots, D].
        codebook: [entries, D, levels].
        entry: integers [slots], entry of each slot.
    """
    _, channels, levels = codebook.shape
    channel = torch.arange(channels, dtype=torch.int32, device=codebook.device)
    index = (entry.int()[:, None] * channels + channel) * levels + codes
    return codebook.flatten().index_select(0, index.flatten()).view(index.shape).float()


def round_fp8(x: Tensor) -> Tensor:
    """Round values to float8 e4m3 (4 bits of exponent, 3 of mantissa), clamped to its range."""
    return x.float().clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn)
