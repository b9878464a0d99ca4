"""Decoder of Emu3's tokenizer of images and videos, for single images (arXiv:2409.18869, section 2.2)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.models.parts.autoencoder import Conv, ConvDecoder, NetworkConfig
from kvbench.models.parts.codebook import VQGAN, Codebook, VQGANConfig

UPSAMPLINGS = 2
"""Number of layers that double a video's frames; for a single image each is a 2-D convolution."""


@dataclass(frozen=True, kw_only=True)
class Emu3VQConfig(VQGANConfig):
    """Shape of the tokenizer; its norms take the codes, which pass the same layers as the latents."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.latents != self.channels:
            raise ValueError(f"model.tokenizer.latents={self.latents}: must equal channels={self.channels}")

    @property
    def networks(self) -> NetworkConfig:
        """Shape of the decoder, with norms that take the codes."""
        return replace(super().networks, code_channels=self.channels)


class _ChannelNorm(nn.Module):
    """Product and sum for each channel, as the submodule `norm`, then SiLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.Conv2d(channels, channels, 1, groups=channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x))


class _FrameBlock(nn.Module):
    """Residual block of two convolutions at the latents' resolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _ChannelNorm(channels), Conv(channels, channels)
        self.norm2, self.conv2 = _ChannelNorm(channels), Conv(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.norm2(self.conv1(self.norm1(x))))


class Emu3VQ(VQGAN):
    """Decoder of the tokenizer: codes to images."""

    def __init__(self, config: Emu3VQConfig) -> None:
        super().__init__()
        self.quantize = Codebook(config)
        self.post_quant_conv = nn.Conv2d(config.channels, config.latents, 1)
        self.time_res_stack = nn.Sequential(*(_FrameBlock(config.latents) for _ in range(config.blocks)))
        self.time_conv = nn.ModuleList(Conv(config.latents, config.latents) for _ in range(UPSAMPLINGS))
        self.decoder = ConvDecoder(config.networks)

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes [B, channels, h, w] to images [B, 3, h patch, w patch], not clamped."""
        codes = codes.to(self.post_quant_conv.weight.dtype)
        both = self.time_res_stack(torch.cat((self.post_quant_conv(codes), codes)))
        for layer in self.time_conv:
            both = F.silu(layer(both))
        return self.decoder(*both.chunk(2))
