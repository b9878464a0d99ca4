"""Rotary positions of next-token models (arXiv:2104.09864), along a sequence or over rows and columns of an image.

A factor rotates channels 2j and 2j + 1 of a head. For files that pair channel j with j + D/2, the rows of the query and
key projections are reordered on reading; scores do not depend on the order.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """Reduction of rotary frequencies for sequences longer than those of the pre-training.

    Without the last three settings every frequency is divided by `factor` (arXiv:2306.15595). With them the wavelength
    decides, as in Llama 3.1 (arXiv:2407.21783): frequencies are divided if it is above `original_context /
    low_freq_factor` positions, kept if below `original_context / high_freq_factor`, and interpolated between.

    Attributes:
        factor: divisor of frequencies.
        low_freq_factor: see above.
        high_freq_factor: see above.
        original_context: maximum tokens of a sequence in the pre-training.
    """

    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_context: int | None = None

    def __post_init__(self) -> None:
        key, (low, high, context) = "model.transformer.rope_scaling", self._bands
        if self.factor < 1:
            raise ValueError(f"{key}.factor={self.factor}: must be at least 1")
        if low is None or high is None or context is None:
            if self._bands != (None, None, None):
                raise ValueError(
                    f"{key}: needs low_freq_factor, high_freq_factor and original_context, or none of them"
                )
        elif not (0 < low < high and context > 0):
            raise ValueError(
                f"{key}.low_freq_factor={low}: must be positive and below high_freq_factor={high}; "
                f"original_context={context} must be positive"
            )

    @property
    def _bands(self) -> tuple[float | None, float | None, int | None]:
        return self.low_freq_factor, self.high_freq_factor, self.original_context

    def scale(self, frequencies: Tensor) -> Tensor:
        """Return the scaled frequencies, float32, shaped like `frequencies`."""
        low, high, context = self._bands
        if low is None or high is None or context is None:
            return frequencies / self.factor
        periods = context * frequencies / (2 * math.pi)  # periods within the original context
        kept = ((periods - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


def rotate_line(length: int, head_dim: int, base: float) -> Tensor:
    """Return the rotations of positions 0 to length - 1, complex64 [length, head_dim/2], cos + i sin."""
    return make_rotations(torch.arange(length)[:, None] * compute_frequencies(head_dim, base))


def rotate_grid(grid: tuple[int, int], head_dim: int, base: float, before: int = 0) -> Tensor:
    """Return the rotations of a condition and of an image's tokens, complex64 [before + rows x columns, head_dim/2].

    The row rotates the first half of a head, the column the second; `head_dim` is a multiple of 4. The `before` factors
    of the condition are zero, not one: its queries and keys vanish, and later tokens score each of them 0 (LlamaGen,
    arXiv:2406.06525, whose code pads the table with zeros).
    """
    frequencies = compute_frequencies(head_dim // 2, base)
    rows, columns = (torch.arange(side)[:, None] * frequencies for side in grid)
    angles = torch.cat((rows[:, None].expand(-1, grid[1], -1), columns.expand(grid[0], -1, -1)), -1)
    image = make_rotations(angles.flatten(0, 1))
    return torch.cat((image.new_zeros(before, head_dim // 2), image))


def compute_frequencies(channels: int, base: float) -> Tensor:
    """Return the frequency base^(-2 j / channels) of each pair j of channels, float32 [channels/2]."""
    return base ** (-torch.arange(0, channels, 2).float() / channels)


def make_rotations(angles: Tensor) -> Tensor:
    """Return cos + i sin, complex64, shaped like the angles."""
    return torch.complex(angles.cos(), angles.sin())
