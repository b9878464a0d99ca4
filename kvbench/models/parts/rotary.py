"""Rotary positions of next-token models (arXiv:2104.09864), along a sequence or over rows and columns of an image.

Channels 2j and 2j + 1 of a head turn together. Files whose programs pair channel j with j + D/2 want the rows of their
query and key projections reordered when they are read; no score depends on the order.
"""

import torch
from torch import Tensor


def rotate_line(length: int, head_dim: int, base: float) -> Tensor:
    """Return the rotations of positions 0 to length - 1, complex64 [length, head_dim/2], cos + i sin."""
    return turn(torch.arange(length)[:, None] * compute_frequencies(head_dim, base))


def rotate_grid(grid: tuple[int, int], head_dim: int, base: float, before: int = 0) -> Tensor:
    """Return the rotations of an image's tokens, row-major, after those of the condition that comes before it.

    The first half of a head turns with the row, the second with the column. Rotations of the condition are zero, not
    one: its queries and keys vanish, so that every later token gives each of them a score of 0 (LlamaGen,
    arXiv:2406.06525, and its program, which pads the table with zeros).

    Args:
        grid: rows and columns of tokens.
        head_dim: channels of a head, a multiple of 4.
        base: of the frequencies.
        before: tokens of the condition.

    Returns:
        complex64 [before + rows x columns, head_dim/2].
    """
    frequencies = compute_frequencies(head_dim // 2, base)
    rows, columns = (torch.arange(side)[:, None] * frequencies for side in grid)
    angles = torch.cat((rows[:, None].expand(-1, grid[1], -1), columns.expand(grid[0], -1, -1)), -1)
    image = turn(angles.flatten(0, 1))
    return torch.cat((image.new_zeros(before, head_dim // 2), image))


def compute_frequencies(channels: int, base: float) -> Tensor:
    """Return the frequencies of pairs of channels, float32 [channels/2]."""
    return base ** (-torch.arange(0, channels, 2).float() / channels)


def turn(angles: Tensor) -> Tensor:
    """Return rotations cos + i sin, complex64 of the angles' shape."""
    return torch.complex(angles.cos(), angles.sin())
