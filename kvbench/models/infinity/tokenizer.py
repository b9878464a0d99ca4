"""Infinity's multi-scale bitwise tokenizer (BSQ-VAE): encoder, residual sign quantiser, decoder.

One implementation for the official checkpoints and for the embedded model. Source: Infinity (arXiv:2412.04431),
section 3.2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.models.parts.autoencoder import Decoder, Encoder, ImageTokenizer, NetworkConfig, Size, resize


@dataclass(frozen=True)
class BSQConfig:
    """Shape of a tokenizer.

    Attributes:
        bits: channels d of the latent; each is one bit per scale.
        base: channels after the encoder's first convolution.
        encoder_widths: channels of each resolution level of the encoder, highest resolution first.
        decoder_widths: channels of each resolution level of the decoder, highest resolution first.
        blocks: residual blocks per encoder level (the decoder has one more).
        stem: pixel-unshuffle factor before the first and pixel-shuffle factor after the last convolution (official: 1).
        mixers: token-mixing blocks in the middle of encoder and decoder (official: 0); they need a fixed `grid`.
        grid: latent (H, W), only with mixers.
        scales: scales with learned code amplitudes; 0 for the official fixed amplitude 1.
    """

    bits: int
    base: int
    encoder_widths: tuple[int, ...]
    decoder_widths: tuple[int, ...]
    blocks: int = 2
    stem: int = 1
    mixers: int = 0
    grid: Size = (0, 0)
    scales: int = 0

    @property
    def networks(self) -> NetworkConfig:
        """Shape of encoder and decoder."""
        shared = ("base", "encoder_widths", "decoder_widths", "blocks", "stem", "mixers", "grid")
        return NetworkConfig(self.bits, *(getattr(self, name) for name in shared))


class BSQ(ImageTokenizer):
    """The tokenizer: images to bits per scale and back."""

    def __init__(self, config: BSQConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder, self.decoder = Encoder(config.networks), Decoder(config.networks)
        if config.scales:
            self.amplitudes = nn.Parameter(
                torch.tensor([1.8 * 0.84**scale for scale in range(config.scales)])
            )

    def codes(self, bits: Tensor, scale: int) -> Tensor:
        """Return the codes of one scale's bits (bool or int): float32 of that shape, of magnitude amplitude/sqrt(d)."""
        amplitude = self.amplitudes[scale].float() if self.config.scales else 1.0
        return (bits.float() * 2 - 1) * (amplitude / self.config.bits**0.5)

    def add(self, summed: Tensor, bits: Tensor, scale: int) -> Tensor:
        """Add a scale's codes to the running sum [B, d, H, W]; bits [B, h, w, d], resized bilinearly."""
        codes = self.codes(bits, scale).permute(0, 3, 1, 2)
        return summed + resize(codes, (summed.shape[2], summed.shape[3]))

    @torch.no_grad()
    def quantize(self, latents: Tensor, sizes: list[Size]) -> tuple[list[Tensor], Tensor]:
        """Quantise latents [B, d, H, W] to the signs of their residuals, scale by scale.

        Returns:
            Bits per scale, bool [B, h, w, d], and the sum of all codes float32 [B, d, H, W].
        """
        summed = torch.zeros_like(latents, dtype=torch.float32)
        bits: list[Tensor] = []
        for scale, size in enumerate(sizes):
            residual = F.interpolate(latents - summed, size, mode="area")
            bits.append((residual > 0).permute(0, 2, 3, 1))
            summed = self.add(summed, bits[-1], scale)
        return bits, summed

    def decode(self, summed: Tensor) -> Tensor:
        """Decode any prefix sum of codes [B, d, H, W] to an image [B, 3, .., ..] clamped to [-1, 1]."""
        return self.decoder(summed).clamp(-1, 1)
