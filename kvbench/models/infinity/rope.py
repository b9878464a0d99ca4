"""2-D rotary positions of Infinity: scales are stretched onto one grid; rows and columns rotate half a head each."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.core.segments import Segment
from kvbench.models.parts.rotary import compute_frequencies, make_rotations


def place_tokens(height: int, width: int, grid: tuple[int, int]) -> Tensor:
    """Return each token's (row, column) on `grid`, row-major: float32 [height*width, 2].

    Index i of n maps to round(i * N / n), halves to even, as in the official tables.
    """
    rows = torch.round(torch.arange(height) * (grid[0] / height))
    columns = torch.round(torch.arange(width) * (grid[1] / width))
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1)


def compute_rotations(
    segments: Sequence[Segment], grid: tuple[int, int], head_dim: int, base: float, device: torch.device | str
) -> Tensor:
    """Return rotations cos + i sin, complex64 [sum t_k, head_dim/2]; the row rotates the first half of a head."""
    frequencies = compute_frequencies(head_dim // 2, base).to(device)
    positions = torch.cat([place_tokens(s.height, s.width, grid) for s in segments]).to(device)
    angles = torch.cat([positions[:, :1] * frequencies, positions[:, 1:] * frequencies], 1)
    return make_rotations(angles)
