"""Lumina-mGPT's sampling, which differs from LlamaGen's in one order."""

from dataclasses import dataclass
from typing import ClassVar

from kvbench.models.llamagen.sampling import LlamaGenSampling


@dataclass(frozen=True)
class LuminaSampling(LlamaGenSampling):
    """How tokens are drawn; truncated first, then over the temperature."""

    temperature_first: ClassVar[bool] = False
