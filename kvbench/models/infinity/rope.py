"""2-D rotary positions of Infinity: every scale is stretched onto one grid; rows and columns turn half a head each."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.core.segments import Segment
from kvbench.models.parts.rotary import compute_frequencies, turn


def place_tokens(height: int, width: int, grid: tuple[int, int]) -> Tensor:
    """Return (row, column) on `grid` of every token of a scale, row-major: float32 [height*width, 2].

    Index i of n goes to round(i * N / n), halves to the even number, as the official tables do.
    """
    rows = torch.round(torch.arange(height) * (grid[0] / height))
    columns = torch.round(torch.arange(width) * (grid[1] / width))
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1)


def compute_rotations(
    segments: Sequence[Segment], grid: tuple[int, int], head_dim: int, base: float, device: torch.device | str
) -> Tensor:
    """Return rotations complex64 [sum t_k, head_dim/2], cos + i sin; the first half of a head turns with the row."""
    frequencies = compute_frequencies(head_dim // 2, base).to(device)
    where = torch.cat([place_tokens(s.height, s.width, grid) for s in segments]).to(device)
    angles = torch.cat([where[:, :1] * frequencies, where[:, 1:] * frequencies], 1)
    return turn(angles)
