"""Rotary positions of next-token models (arXiv:2104.09864), along a sequence or over rows and columns of an image.

A factor rotates channels 2j and 2j + 1 of a head. For files that pair channel j with j + D/2, the rows of the query and
key projections are reordered on reading; scores do not depend on the order.
"""

import torch
from torch import Tensor


def rotate_line(length: int, head_dim: int, base: float) -> Tensor:
    """Return the rotations of positions 0 to length - 1, complex64 [length, head_dim/2], cos + i sin."""
    return make_rotations(torch.arange(length)[:, None] * compute_frequencies(head_dim, base))


def rotate_grid(grid: tuple[int, int], head_dim: int, base: float, before: int = 0) -> Tensor:
    """Return the rotations of a condition and of an image's tokens, complex64 [before + rows x columns, head_dim/2].

    The row rotates the first half of a head, the column the second; `head_dim` is a multiple of 4. The `before` factors
    of the condition are zero, not one: its queries and keys vanish, and later tokens score each of them 0 (LlamaGen,
    arXiv:2406.06525, whose program pads the table with zeros).
    """
    frequencies = compute_frequencies(head_dim // 2, base)
    rows, columns = (torch.arange(side)[:, None] * frequencies for side in grid)
    angles = torch.cat((rows[:, None].expand(-1, grid[1], -1), columns.expand(grid[0], -1, -1)), -1)
    image = make_rotations(angles.flatten(0, 1))
    return torch.cat((image.new_zeros(before, head_dim // 2), image))


def compute_frequencies(channels: int, base: float) -> Tensor:
    """Return the frequencies of pairs of channels, float32 [channels/2]."""
    return base ** (-torch.arange(0, channels, 2).float() / channels)


def make_rotations(angles: Tensor) -> Tensor:
    """Return rotations cos + i sin, complex64 of the angles' shape."""
    return torch.complex(angles.cos(), angles.sin())
