"""Lumina-mGPT's sampling settings."""

from dataclasses import dataclass
from typing import ClassVar

from kvbench.models.parts.sampling import TokenSampling


@dataclass(frozen=True)
class LuminaSampling(TokenSampling):
    """Sampling of the official code: top-k, then division by the temperature, then top-p."""

    temperature_first: ClassVar[bool] = False
