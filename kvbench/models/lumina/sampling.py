"""Lumina-mGPT's sampling, which differs from LlamaGen's in one order."""

from dataclasses import dataclass
from typing import ClassVar

from kvbench.models.llamagen.sampling import LlamaGenSampling


@dataclass(frozen=True)
class LuminaSampling(LlamaGenSampling):
    """Sampling of tokens: truncation first, then division by the temperature."""

    temperature_first: ClassVar[bool] = False
