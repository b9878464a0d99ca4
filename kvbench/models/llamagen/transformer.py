"""LlamaGen's next-token transformer (arXiv:2406.06525), for every published size: a condition, then a decoder.

The condition is a class (one token) or a caption (`text_tokens` tokens). Parameters are named as in the official
checkpoints, so that loading can be strict.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvbench.kernels.linear import linear
from kvbench.models.base import require_sizes
from kvbench.models.parts.decoder import Decoder, ImageDecoderConfig


@dataclass(frozen=True, kw_only=True)
class LlamaGenConfig(ImageDecoderConfig):
    """Shape of a transformer.

    Attributes:
        grid: rows and columns of image tokens.
        classes: number of classes; the embedding has one more row for no class.
        text_width: channels of the text encoder's features; None for classes.
        text_tokens: tokens of a caption, with its padding.
        condition_keys: whether the condition's queries and keys are kept, which the official rotation sets to zero.
    """

    grid: tuple[int, int]
    classes: int = 1000
    text_width: int | None = None
    text_tokens: int = 120
    condition_keys: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes("model.transformer", self, "classes", "text_tokens")
        self._check_cells("grid")

    @property
    def condition(self) -> int:
        """Number of tokens of the condition."""
        return 1 if self.text_width is None else self.text_tokens

    @property
    def cells(self) -> tuple[int, int]:
        """Rows and columns of an image's codes."""
        return self.grid

    def rotations(self, length: int) -> Tensor:
        """Return the rotations of a condition and an image's tokens, complex64 [length, head_dim/2].

        The condition's factors are 0, so that its queries and keys vanish, or 1 with `condition_keys`.
        """
        table = super().rotations(length)
        if self.condition_keys:
            table[: length - self.tokens] = 1
        return table


class ClassEmbedding(nn.Module):
    """Embedding of a class as one token."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(config.classes + 1, config.width)

    def forward(self, labels: Tensor, *, guided: bool) -> Tensor:
        """Embed classes int64 [B], then B times no class if `guided`: [B or 2 B, 1, width]."""
        if guided:
            labels = torch.cat((labels, torch.full_like(labels, self.embedding_table.num_embeddings - 1)))
        return self.embedding_table(labels)[:, None]


class _Projection(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = (nn.Linear(channels, width, bias=False) for channels in (inputs, width))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.fc1.weight
        return linear(linear(x, weight, None, weight.dtype, gelu=True), self.fc2.weight, None)


class CaptionEmbedding(nn.Module):
    """MLP from a caption's features to tokens; zeros stay zeros. A parameter holds the features of no caption."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        assert config.text_width is not None
        self.cap_proj = _Projection(config.text_width, config.width)
        self.uncond_embedding = nn.Parameter(torch.zeros(config.text_tokens, config.text_width))

    def forward(self, features: Tensor, *, guided: bool) -> Tensor:
        """Embed features [B, text_tokens, text_width], then B times no caption if `guided`: [B or 2 B, .., width]."""
        if guided:
            features = torch.cat((features, self.uncond_embedding.expand_as(features)))
        return self.cap_proj(features)


class LlamaGen(Decoder):
    """Decoder whose `cls_embedding` embeds the condition."""

    config: LlamaGenConfig

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__(config)
        self.cls_embedding = (ClassEmbedding if config.text_width is None else CaptionEmbedding)(config)
