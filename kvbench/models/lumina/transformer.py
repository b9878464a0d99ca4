"""Lumina-mGPT's language model (arXiv:2408.02657), Chameleon's, whose vocabulary includes image codes."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvbench.models.parts.decoder import Decoder, LinedImageConfig


@dataclass(frozen=True, kw_only=True)
class LuminaConfig(LinedImageConfig):
    """Shape of the language model."""

    codes: int = 8192
    qk_norm: Literal["none", "rms", "layer"] = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.image) < 2 or self.image[0] % 2 or self.image[1] % 2:
            raise ValueError(
                f"model.transformer.image={list(self.image)}: must be two even numbers, at least 2"
            )


class Lumina(Decoder):
    """Language model whose vocabulary includes the image tokens."""

    config: LuminaConfig

    def rotations(self, length: int) -> Tensor:
        """Return rotations, complex64 [length, head_dim/2], with cosines and sines rounded to the weights' dtype."""
        exact = torch.view_as_real(super().rotations(length))
        return torch.view_as_complex(exact.to(self.norm.weight.dtype).float())
