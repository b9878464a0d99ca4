"""`group_norm` on a GPU in channels-last layout: moments of parts of an image, moments of groups, then the norm."""

import torch
import triton.language as tl
from torch import Tensor

from kvbench.kernels.triton.launch import cdiv, kernel, next_power_of_2

TILE = 8192
"""Elements per tile, all channels of some positions."""
TILES = 8
"""Tiles of a part of an image. Parts do not depend on the batch, so neither do their sums."""
WARPS = 8


@kernel()
def moments_kernel(
    x, moments, positions: tl.int64, parts: tl.int64,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Compute mean and summed squared deviations of each channel over a part. Grid: parts, images.

    Each lane updates its own moments tile by tile (Welford), which are then merged (Chan, Golub and LeVeque).
    """
    part, image = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    channel, rows = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_P)
    fits = channel < CHANNELS
    first = part * (TILES * BLOCK_P)
    base = x + (image * positions + first) * CHANNELS
    count = tl.zeros([BLOCK_P], tl.float32)
    mean = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    squares = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for tile in range(TILES):
        row = tile * BLOCK_P + rows
        inside = first + row < positions
        keep = inside[:, None] & fits[None, :]
        place = base + row[:, None] * CHANNELS + channel[None, :]
        value = tl.load(place, mask=keep, other=0.0).to(tl.float32)
        count += tl.where(inside, 1.0, 0.0)
        before = tl.where(keep, value - mean, 0.0)
        mean += before / tl.maximum(count, 1.0)[:, None]
        squares += before * tl.where(keep, value - mean, 0.0)
    weight = count[:, None] / tl.sum(count, 0)
    whole = tl.sum(mean * weight, 0)
    apart = mean - whole[None, :]
    spread = tl.sum(squares + apart * apart * count[:, None], 0)
    out = moments + (image * parts + part) * (2 * CHANNELS) + channel
    tl.store(out, whole, mask=fits)
    tl.store(out + CHANNELS, spread, mask=fits)


@kernel()
def group_kernel(
    moments, groups, positions: tl.int64, parts: tl.int64, eps: tl.float32,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Merge the moments of a group's channels over all parts to its mean and factor. Grid: groups, images."""
    group, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    width: tl.constexpr = CHANNELS // GROUPS
    lane = tl.arange(0, BLOCK_G)
    numbers = positions.to(tl.float32) * width
    base = moments + image * parts * (2 * CHANNELS) + group * width + lane[None, :]
    mean = tl.zeros([BLOCK_S, BLOCK_G], tl.float32)
    for first in range(0, parts, BLOCK_S):
        part = first + tl.arange(0, BLOCK_S).to(tl.int64)
        keep = (part < parts)[:, None] & (lane < width)[None, :]
        share = tl.minimum(positions - part * PART, PART).to(tl.float32) / numbers
        mean += tl.load(base + part[:, None] * (2 * CHANNELS), mask=keep, other=0.0) * share[:, None]
    whole = tl.sum(tl.sum(mean, 1), 0)
    spread = tl.zeros([BLOCK_S, BLOCK_G], tl.float32)
    for first in range(0, parts, BLOCK_S):
        part = first + tl.arange(0, BLOCK_S).to(tl.int64)
        keep = (part < parts)[:, None] & (lane < width)[None, :]
        count = tl.minimum(positions - part * PART, PART).to(tl.float32)
        place = base + part[:, None] * (2 * CHANNELS)
        apart = tl.where(keep, tl.load(place, mask=keep, other=0.0) - whole, 0.0)
        spread += tl.load(place + CHANNELS, mask=keep, other=0.0) + apart * apart * count[:, None]
    variance = tl.sum(tl.sum(spread, 1), 0) / numbers
    out = groups + (image * GROUPS + group) * 2
    tl.store(out, whole)
    tl.store(out + 1, 1 / tl.sqrt(variance + eps))


@kernel()
def normalise_kernel(
    x, groups, weight, bias, out, positions: tl.int64,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Normalise a block of positions; rounding as in `group_norm`. Grid: blocks, images."""
    image, channel = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_C)
    fits = channel < CHANNELS
    group = groups + (image * GROUPS + channel // (CHANNELS // GROUPS)) * 2
    mean = tl.load(group, mask=fits, other=0.0)
    factor = tl.load(group + 1, mask=fits, other=0.0)
    times = tl.load(weight + channel, mask=fits, other=0.0).to(tl.float32)
    plus = tl.load(bias + channel, mask=fits, other=0.0).to(tl.float32)
    row = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    keep = (row < positions)[:, None] & fits[None, :]
    place = (image * positions + row)[:, None] * CHANNELS + channel[None, :]
    value = tl.load(x + place, mask=keep, other=0.0).to(tl.float32)
    value = (value - mean[None, :]) * factor[None, :] * times[None, :] + plus[None, :]
    value = value.to(weight.dtype.element_ty).to(tl.float32)
    if SILU:
        value = value / (1 + tl.exp(-value))
    tl.store(out + place, value.to(out.dtype.element_ty), mask=keep)


def group_norm_triton(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, *, silu: bool
) -> Tensor:
    """Return the norm of x, contiguous in channels-last layout, as `kvbench.kernels.group_norm.group_norm` does."""
    images, channels, height, width = x.shape
    positions, block = height * width, next_power_of_2(channels)
    rows = max(1, TILE // block)
    parts = cdiv(positions, TILES * rows)
    moments = x.new_empty(images, parts, 2, channels, dtype=torch.float32)
    means = x.new_empty(images, groups, 2, dtype=torch.float32)
    out = torch.empty_like(x, memory_format=torch.channels_last)
    moments_kernel[(parts, images)](
        x, moments, positions, parts, channels, block, rows, TILES, num_warps=WARPS
    )
    lanes = next_power_of_2(channels // groups)
    group_kernel[(groups, images)](
        moments, means, positions, parts, eps, channels, groups, lanes,
        min(next_power_of_2(parts), max(1, TILE // 2 // lanes)), TILES * rows,
    )  # fmt: skip
    normalise_kernel[(cdiv(positions, rows), images)](
        x, means, weight, bias, out, positions, channels, groups, block, rows, silu, num_warps=WARPS
    )
    return out
