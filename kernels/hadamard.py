"""Codes of rotated vectors: a Hadamard rotation, fixed levels and one gain per vector (TurboQuant, arXiv:2504.19874).

The rotation H of a vector of D channels makes its elements nearly normal, whatever the vector is, so one table of
levels serves all vectors: x is read back as gain H levels[code]. H is symmetric and its own inverse. Attention needs no
rotation of each token: q k^T = (H q)(H k)^T, and H is applied once to a sum of rotated values.

As in vLLM's `turboquant_*_nc`, the gain gives a vector its own length; it includes the length of its levels.
"""

import torch
from torch import Tensor

from kvbench.kernels.quantise import MAX_HALF, encode_codebook, pack

HALF_CENTROIDS = {
    2: (0.4527800346, 1.5104176085),
    3: (0.2450941789, 0.7560052812, 1.3439092785, 2.1519457045),
    4: (
        0.1283950299, 0.3880482995, 0.6567591185, 0.9423404565,
        1.2562311973, 1.6180463860, 2.0690172265, 2.7325895710,
    ),
}  # fmt: skip
"""Positive Lloyd-Max levels of a standard normal variable, by bits (Max 1960, doi:10.1109/TIT.1960.1057548)."""


def list_levels(bits: int) -> Tensor:
    """Return the levels of codes of `bits` bits, ascending, float32 [2^bits]."""
    half = torch.tensor(HALF_CENTROIDS[bits])
    return torch.cat((-half.flip(0), half))


def count_mixed(channels: int) -> int:
    """Return the channels that a rotation mixes, the largest power of two that divides `channels`."""
    return channels & -channels


def rotate_channels(x: Tensor) -> Tensor:
    """Return vectors [..., D] times the Hadamard matrix H, float32 [..., D].

    H[i, j] = (-1)^popcount(i & j) / sqrt(D) if D is a power of two. Otherwise the largest power of two that divides D,
    n, gives D / n interleaved vectors, channels c, c + D / n, c + 2 D / n ..., each rotated by itself. The bytes of a
    result depend on its vector alone, which products of matrices do not guarantee.
    """
    channels = x.shape[-1]
    mixed = count_mixed(channels)
    y, step = x.float(), channels // mixed
    while step < channels:
        first, second = y.unflatten(-1, (-1, 2, step)).unbind(-2)
        y = torch.stack((first + second, first - second), -2).flatten(-3)
        step *= 2
    return y * mixed**-0.5


def encode_rotated(x: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Encode vectors [batch, slots, D].

    Args:
        x: the vectors.
        levels: ascending, float32 [2^bits], for values of mean 0 and variance 1.

    Returns:
        Codes uint8 [batch, slots, D bits / 8] and gains float16 [batch, slots]; the gain of a vector of zeros is 0.
    """
    x = x.float()
    norm = torch.linalg.vector_norm(x, dim=-1)
    scale = x.shape[-1] ** 0.5 / norm.where(norm > 0, 1)
    codes = encode_codebook(rotate_channels(x) * scale[..., None], levels[None])
    length = torch.linalg.vector_norm(levels[codes.int()], dim=-1)
    bits = len(levels).bit_length() - 1
    return pack(codes, bits), (norm / length).clamp(max=MAX_HALF).half()
