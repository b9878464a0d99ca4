"""Lumina-mGPT's language model (arXiv:2408.02657): Chameleon's, which has image codes among its words."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvbench.models.base import require_positive
from kvbench.models.parts.decoder import Decoder, ImageDecoderConfig

SPECIAL = 6
"""Tokens that are neither words nor codes and without which no image is drawn (`prompt.Marks`)."""


@dataclass(frozen=True, kw_only=True)
class LuminaConfig(ImageDecoderConfig):
    """Shape of a language model that draws; `vocabulary` counts all tokens, those of images too.

    Attributes:
        image: rows and columns of image codes; tokens of a line are its codes and a newline.
        codes: image codes there are.
    """

    image: tuple[int, int]
    codes: int = 8192
    qk_norm: Literal["none", "rms", "layer"] = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("model.transformer", codes=self.codes)
        if min(self.image) < 2 or self.image[0] % 2 or self.image[1] % 2:
            raise ValueError(
                f"model.transformer.image={list(self.image)}: rows and columns of codes, two even numbers from 2 on"
            )
        if self.vocabulary <= self.codes + SPECIAL:
            raise ValueError(
                f"model.transformer.vocabulary={self.vocabulary}: codes={self.codes} and {SPECIAL} special tokens "
                "leave no word"
            )

    @property
    def cells(self) -> tuple[int, int]:
        """Rows and columns of an image's codes."""
        return self.image

    @property
    def line(self) -> int:
        """Tokens of a line: its codes and a newline; the last line has one too."""
        return self.image[1] + 1


class Lumina(Decoder):
    """The language model."""

    config: LuminaConfig

    def rotations(self, length: int) -> Tensor:
        """Return rotations whose cosines and sines are those of the weights' dtype, complex64 [length, head_dim/2]."""
        exact = torch.view_as_real(super().rotations(length))
        return torch.view_as_complex(exact.to(self.norm.weight.dtype).float())
