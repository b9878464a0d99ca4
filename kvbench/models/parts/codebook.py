"""Codebook of an image tokenizer: its shape, its modules and the search for the nearest code."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.models.parts.autoencoder import ImageTokenizer, NetworkConfig


@dataclass(frozen=True)
class CodebookConfig:
    """Shape of a tokenizer with a symmetric encoder and decoder.

    Attributes:
        codes: entries of the codebook.
        channels: channels of a code.
        widths: channels of each resolution level of encoder and decoder, highest resolution first.
        blocks: residual blocks per encoder level (the decoder has one more).
        stem: pixel-unshuffle factor before the first and pixel-shuffle factor after the last convolution (official: 1).
        base: channels after the encoder's first convolution (`ch` of the official code); None for `widths[0]`,
            which differs from it if `ch_mult[0]` is not 1.
    """

    codes: int
    channels: int
    widths: tuple[int, ...]
    blocks: int = 2
    stem: int = 1
    base: int | None = None

    attention: ClassVar[Literal["middle", "lowest"]] = "lowest"  # see `NetworkConfig`

    def __post_init__(self) -> None:
        if not self.widths:
            raise ValueError("model.tokenizer.widths=[]: must have the channels of at least one resolution")

    @property
    def networks(self) -> NetworkConfig:
        """Shape of encoder and decoder."""
        widths = tuple(self.widths)
        return NetworkConfig(
            base=self.base or widths[0],
            encoder_widths=widths,
            decoder_widths=widths,
            blocks=self.blocks,
            stem=self.stem,
            latents=self.channels,
            attention=self.attention,
        )


@dataclass(frozen=True, kw_only=True)
class VQGANConfig(CodebookConfig):
    """Shape of a tokenizer with a 1x1 convolution on either side of its codes.

    Attributes:
        latents: channels between the networks and these convolutions.
    """

    latents: int

    @property
    def networks(self) -> NetworkConfig:
        """Shape of encoder and decoder."""
        return replace(super().networks, latents=self.latents)


class Codebook(nn.Module):
    """Table of codes in the submodule `embedding`, as in published files."""

    def __init__(self, config: CodebookConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.codes, config.channels)


class VQGAN(ImageTokenizer):
    """Base class of tokenizers that look up and decode one code per token."""

    quantize: Codebook
    post_quant_conv: nn.Conv2d

    @property
    def _book(self) -> Tensor:
        """Codes, float32 [codes, channels]."""
        return self.quantize.embedding.weight

    def codes(self, tokens: Tensor) -> Tensor:
        """Look up the codes of tokens int64 [B, h, w]: float32 [B, channels, h, w]."""
        return F.embedding(tokens, self._book).permute(0, 3, 1, 2)

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes [B, channels, h, w] to images [B, 3, h patch, w patch], not clamped."""
        return self.decoder(self.post_quant_conv(codes.to(self.post_quant_conv.weight.dtype)))


def find_nearest(z: Tensor, book: Tensor) -> Tensor:
    """Return the rows int64 [...] of a codebook [codes, channels] nearest to vectors [..., channels]."""
    return (z.square().sum(-1, keepdim=True) + book.square().sum(1) - 2 * (z @ book.T)).argmin(-1)
