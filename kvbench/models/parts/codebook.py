"""Codebook of an image tokenizer: its shape, its module and the search for the nearest code."""

from dataclasses import dataclass

from torch import Tensor, nn

from kvbench.models.parts.autoencoder import NetworkConfig


@dataclass(frozen=True)
class CodebookConfig:
    """Shape of a tokenizer whose encoder and decoder mirror each other.

    Attributes:
        codes: entries of the codebook.
        channels: channels of a code.
        widths: channels of each resolution level of encoder and decoder, highest resolution first.
        blocks: residual blocks per encoder level (the decoder has one more).
        stem: pixel-unshuffle factor before the first and pixel-shuffle factor after the last convolution (official: 1).
        base: channels after the encoder's first convolution; None for those of the first level. The official programs'
            `ch`, from which `widths[0]` differs where `ch_mult[0]` is not 1.
    """

    codes: int
    channels: int
    widths: tuple[int, ...]
    blocks: int = 2
    stem: int = 1
    base: int | None = None

    @property
    def networks(self) -> NetworkConfig:
        """Shape of encoder and decoder, with attention at the lowest resolution."""
        widths = tuple(self.widths)
        shape = (self.channels, self.base or widths[0], widths, widths, self.blocks, self.stem)
        return NetworkConfig(*shape, attention="lowest")


class Codebook(nn.Module):
    """The codes, under the name `embedding`."""

    def __init__(self, config: CodebookConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.codes, config.channels)


def find_nearest(z: Tensor, book: Tensor) -> Tensor:
    """Return the rows int64 [...] of a codebook [codes, channels] nearest to vectors [..., channels]."""
    return (z.square().sum(-1, keepdim=True) + book.square().sum(1) - 2 * (z @ book.T)).argmin(-1)
