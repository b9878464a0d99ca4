"""LlamaGen's image tokenizer: a VQGAN whose codes lie on the unit sphere (arXiv:2406.06525, section 3.1)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.models.autoencoder import Decoder, Encoder, NetworkConfig


@dataclass(frozen=True)
class VQConfig:
    """Shape of a tokenizer.

    Attributes:
        codes: entries of the codebook.
        channels: channels of a code.
        latents: channels between the networks and the 1x1 convolutions around the codes.
        widths: channels of each resolution level of encoder and decoder, highest resolution first.
        blocks: residual blocks per encoder level (the decoder has one more).
        stem: pixel-unshuffle factor before the first and pixel-shuffle factor after the last convolution (official: 1).
    """

    codes: int
    channels: int
    latents: int
    widths: tuple[int, ...]
    blocks: int = 2
    stem: int = 1

    @property
    def networks(self) -> NetworkConfig:
        """Shape of encoder and decoder."""
        widths = tuple(self.widths)
        return NetworkConfig(
            self.latents, widths[0], widths, widths, self.blocks, self.stem, attention="lowest"
        )


class Codebook(nn.Module):
    """The codes, under the name `embedding`."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.codes, config.channels)


class VQ(nn.Module):
    """The tokenizer: images to tokens and back."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.patch = config.networks.patch
        self.encoder, self.decoder = Encoder(config.networks), Decoder(config.networks)
        self.quantize = Codebook(config)
        self.quant_conv = nn.Conv2d(config.latents, config.channels, 1)
        self.post_quant_conv = nn.Conv2d(config.channels, config.latents, 1)

    def latents(self, images: Tensor) -> Tensor:
        """Map images [B, 3, H, W] in [-1, 1] to latents [B, channels, H/patch, W/patch]."""
        return self.quant_conv(self.encoder(images))

    @torch.no_grad()
    def encode(self, latents: Tensor) -> Tensor:
        """Return the codes nearest to latents [B, channels, h, w], both of unit length: tokens int64 [B, h, w]."""
        z, book = F.normalize(latents.permute(0, 2, 3, 1), dim=-1), self._book
        return (z.square().sum(-1, keepdim=True) + book.square().sum(1) - 2 * (z @ book.T)).argmin(-1)

    def codes(self, tokens: Tensor) -> Tensor:
        """Look up the codes of tokens int64 [B, h, w], of unit length: float32 [B, channels, h, w]."""
        return F.embedding(tokens, self._book).permute(0, 3, 1, 2)

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes [B, channels, h, w] to images [B, 3, h patch, w patch], not clamped."""
        return self.decoder(self.post_quant_conv(codes))

    @property
    def _book(self) -> Tensor:
        return F.normalize(self.quantize.embedding.weight, dim=-1)
