"""Group norms of image tokenizers: plain ones, and ones that the codes of a place scale and shift.

Shapes: B images, C channels of a layer, H x W places of a layer, h x w codes.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.kernels.group_norm import group_norm


class Norm(nn.Module):
    """Group norm in the submodule `norm`, followed by SiLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32 if channels % 32 == 0 else 24, channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and activate images [B, C, H, W]."""
        return normalise(self.norm, x, silu=True)


class SpatialNorm(nn.Module):
    """Group norm with a scale and a shift for each place, linear in its code (MoVQ, arXiv:2209.09002).

    Args:
        channels: C.
        codes: channels of a code.
        silu: whether SiLU follows.
    """

    def __init__(self, channels: int, codes: int, *, silu: bool = True) -> None:
        super().__init__()
        self.silu = silu
        self.norm = nn.GroupNorm(32, channels, eps=1e-6)
        self.scale, self.shift = (nn.Conv2d(codes, channels, 1) for _ in range(2))

    def forward(self, x: Tensor, codes: Tensor) -> Tensor:
        """Normalise [B, C, H, W] under codes [B, channels, h, w]; H / h and W / w are whole numbers."""
        height, width = codes.shape[2:]
        # Places that share a code are axes of their own, so that neither scale nor shift is copied to each place.
        scale, shift = (layer(codes)[:, :, :, None, :, None] for layer in (self.scale, self.shift))
        cells = normalise(self.norm, x).unflatten(3, (width, -1)).unflatten(2, (height, -1))
        out = (cells * scale).add_(shift).flatten(4, 5).flatten(2, 3)
        return F.silu(out) if self.silu else out


def normalise(norm: nn.GroupNorm, x: Tensor, *, silu: bool = False) -> Tensor:
    """Apply a group norm and, with `silu`, SiLU to [B, C, H, W], as `kvbench.kernels.group_norm` does."""
    return group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps, silu=silu)
