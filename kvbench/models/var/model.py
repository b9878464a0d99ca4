"""VAR: settings and shapes without weights, then classes to images."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec
from kvbench.forced.passes import ForcedScales, ReadableScales
from kvbench.models.base import Cache, read_labels
from kvbench.models.files.checkpoints import Clean
from kvbench.models.files.official_files import clean_transformer, clean_vqvae
from kvbench.models.image_model import ImageModel
from kvbench.models.noise import Noise
from kvbench.models.parts.decoding import Decoding
from kvbench.models.parts.layers import count_layer_bytes
from kvbench.models.var.loop import draw_token_scales
from kvbench.models.var.sampling import VARSampling
from kvbench.models.var.tokenizer import VQVAE, VQConfig
from kvbench.models.var.transformer import VAR, VARConfig, is_rounded


@dataclass
class VARModel(ImageModel[VAR, VQVAE], ReadableScales):
    """VAR at any size.

    A prompt is a class number, -1 for no class; later words, such as the class's name, are ignored. Sources are
    `transformer` and `tokenizer`.

    Attributes:
        default_sinks: number of sink scales if the configuration names none.
        default_alpha: share of heads that HACK and HACK++ call contextual if the configuration names none.
        default_tau: exponent by which HACK++ shares its budget if the configuration names none.
    """

    transformer: VARConfig
    tokenizer: VQConfig
    sampling: VARSampling
    default_sinks: int = 2
    default_alpha: float = 0.15
    default_tau: float = 0.5

    half: ClassVar[torch.dtype] = torch.float16
    networks = (VAR, VQVAE)
    decoding = Decoding("float16", half="autocast", half_pixels=True)

    def __post_init__(self) -> None:
        for name in ("codes", "channels"):
            value, other = getattr(self.transformer, name), getattr(self.tokenizer, name)
            if value != other:
                raise ValueError(f"model.transformer.{name}={value}: must be model.tokenizer.{name}={other}")
        self._check_sources()

    @cached_property
    def spec(self) -> ModelSpec:
        """Shapes and schedule, without weights."""
        config = self.transformer
        return ModelSpec(self.name, config.depth, config.heads, config.width // config.heads, config.segments)

    def activation_bytes(self, prompts: int) -> int:
        """Return the peak bytes of a generation on a GPU without weights and cache.

        The peak is at the last scale, in a layer, in the logits or in sampling.
        """
        config, cells = self.transformer, self.spec.segments[-1].length
        rows, logits = 2 * prompts * cells, 4 * prompts * cells * config.codes
        layer = count_layer_bytes(rows, config.width, 4 * config.width)
        # The stream and its norm, and logits of both branches in 16 bits and float32; then guided and truncated logits,
        # probabilities, noise, and their quotient.
        return max(layer, rows * config.width * 6 + 3 * logits, 5 * logits)

    @property
    def cells(self) -> int:
        """Number of latent cells of an image."""
        return self.spec.segments[-1].length

    @property
    def _passes(self) -> list[tuple[object, str]]:
        return [(self._transformer, name) for name in ("condition", "scale")]

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Check that every prompt begins with a class number."""
        read_labels(prompts, self.transformer.classes, self.name)

    def output_projection(self, layer: int) -> Tensor:
        """Return W_o of a layer of the loaded model, [width, query heads x D]."""
        return self._transformer.layers[layer].attn.proj.weight

    @property
    def _cleans(self) -> dict[str, Clean]:
        return {"transformer": clean_transformer, "tokenizer": clean_vqvae}

    def _find_dtype(self, name: str, device: torch.device | str) -> torch.dtype:
        return self.compute_dtype(device) if is_rounded(name) else torch.float32

    def _draw(
        self, prompts: Sequence[str], cache: Cache, noise: Noise, forced: ForcedScales | None = None
    ) -> Tensor:
        labels = torch.tensor(read_labels(prompts, self.transformer.classes, self.name), device=self._device)
        networks, activations = (self._transformer, self._tokenizer), self.activation_bytes(len(prompts))
        if forced is not None and self.sampling.smooth:
            raise ConfigError(
                "model.sampling.smooth=true: mixes codes, so that there are no tokens to score; set it to false"
            )
        return draw_token_scales(
            *networks, labels, cache, noise, self.sampling, activations=activations, forced=forced
        )
