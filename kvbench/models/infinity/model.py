"""Infinity: settings and shapes without weights, then prompts to images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from kvbench.core.config import ConfigError
from kvbench.core.files import hash_values
from kvbench.core.segments import ModelSpec, next_scale
from kvbench.forced.passes import ForcedScales, ReadableScales
from kvbench.models.base import Cache, refuse
from kvbench.models.files.checkpoints import Clean
from kvbench.models.files.official_files import clean_tokenizer, clean_transformer
from kvbench.models.image_model import ImageModel
from kvbench.models.infinity.loop import draw_bit_scales
from kvbench.models.infinity.positive_prompt import add_positive_prompt
from kvbench.models.infinity.rope import compute_rotations
from kvbench.models.infinity.sampling import Sampling
from kvbench.models.infinity.scales import Size, rotary_grid, schedule
from kvbench.models.infinity.tokenizer import BSQ, BSQConfig
from kvbench.models.infinity.transformer import Infinity, InfinityConfig
from kvbench.models.noise import Noise
from kvbench.models.parts.decoding import Decoding
from kvbench.models.parts.layers import count_layer_bytes
from kvbench.models.parts.text import (
    HashedText,
    TextEncoder,
    VocabularyConfig,
    check_heads,
    load_t5,
    load_vocabulary,
)
from kvbench.scenes.names import find_vocabulary
from kvbench.scenes.vocabulary import Vocabulary


@dataclass
class InfinityModel(ImageModel[Infinity, BSQ], ReadableScales):
    """Infinity at any size; sources are `transformer`, `tokenizer` and `text`.

    Attributes:
        sizes: scale schedule; empty for the schedule of `aspect` and `pixels`.
        aspect: height / width, one of the published ratios; its grid is the default of `transformer.rope_grid`.
        pixels: 0.06M, 0.25M, 0.60M or 1M.
        text: `t5` (Flan-T5 of transformers) or `vocabulary` (the closed vocabulary of `captions`).
        captions: `scenes`, or the path of a file of names (`kvbench.scenes.names`), which may begin with `pkg://`.
        text_layers: layers of the vocabulary encoder.
        text_heads: heads of the vocabulary encoder.
        positive_prompt: whether prompts that mention people get the official suffix; the negative prompt never does.
        negative_prompt: unconditional text; None or an empty string for the learned text.
        default_sinks: number of sink scales if the configuration names none.
        default_alpha: share of heads that HACK and HACK++ call contextual if the configuration names none.
        default_tau: exponent by which HACK++ shares its budget if the configuration names none.
    """

    transformer: InfinityConfig
    tokenizer: BSQConfig
    sampling: Sampling
    sizes: tuple[Size, ...] = ()
    aspect: float = 1.0
    pixels: str = "1M"
    text: Literal["t5", "vocabulary"] = "t5"
    captions: str = "scenes"
    text_layers: int = 2
    text_heads: int = 5
    positive_prompt: bool = False
    negative_prompt: str | None = None
    default_sinks: int = 3
    default_alpha: float = 0.2
    default_tau: float = 1.0

    networks = (Infinity, BSQ)
    decoding = Decoding("bfloat16", half="autocast", half_pixels=True)

    def __post_init__(self) -> None:
        self._check_sources("text")
        grid = rotary_grid(self.aspect)
        if self.transformer.rope_grid is None:
            self.transformer = replace(self.transformer, rope_grid=grid)
        self.sampling.check_layers(self.transformer.depth)
        if self.text == "vocabulary":
            check_heads(self, self.text_heads, self.transformer.text_width)
        if self.sizes and self.tokenizer.mixers and tuple(self.sizes[-1]) != tuple(self.tokenizer.grid):
            raise ValueError(
                f"model.sizes={[list(size) for size in self.sizes]}: must end with {list(self.tokenizer.grid)}, the "
                "only grid that model.tokenizer.grid decodes"
            )

    @cached_property
    def spec(self) -> ModelSpec:
        """Shapes and schedule, without weights."""
        sizes = self.sizes or schedule(self.aspect, self.pixels)
        config = self.transformer
        return ModelSpec(
            self.name,
            config.depth,
            config.heads,
            config.width // config.heads,
            next_scale([(height, width) for height, width in sizes]),
            self.sampling.branches(len(sizes)),
        )

    @property
    def vocabulary(self) -> Vocabulary:
        """The closed vocabulary of the captions.

        It is not stored in the model: classes of what a model stores count in the identity of runs.

        Raises:
            ConfigError: the file of names is missing or wrong.
        """
        try:
            return find_vocabulary(self.captions)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.captions={self.captions}: cannot be read ({error})") from None

    @property
    def text_config(self) -> VocabularyConfig:
        """Shape of the text encoder with a closed vocabulary."""
        return VocabularyConfig(
            len(self.vocabulary),
            self.vocabulary.longest,
            self.transformer.text_width,
            self.text_layers,
            self.text_heads,
        )

    def resolve_settings(self, device: torch.device | str) -> Mapping[str, object]:
        """Return the settings of an image model, with the hash of the vocabulary instead of its file's path."""
        resolved = super().resolve_settings(device)
        if self.captions == "scenes":
            return resolved
        return {**resolved, "captions": hash_values(self.vocabulary.words)}

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Check that every prompt has only words of the vocabulary, if the model has one, and fits the learned text."""
        if self.text == "vocabulary":
            self.vocabulary.check(prompts)
            config, longest = self.transformer, self.vocabulary.longest
            rule = f"be at least {longest}, the words of the longest caption"
            refuse("model.transformer", config, text_maxlen=(config.text_maxlen < longest, rule))

    def activation_bytes(self, prompts: int) -> int:
        """Return the peak bytes of a generation on a GPU without weights and cache, in a layer of the last scale."""
        spec, config = self.spec, self.transformer
        rows = prompts * spec.branches * spec.segments[-1].length
        return count_layer_bytes(rows, config.width, config.feed_forward)

    @property
    def cells(self) -> int:
        """Number of latent cells of an image, h w."""
        return self.spec.segments[-1].length * self.transformer.token_channels // self.tokenizer.bits

    @property
    def _passes(self) -> list[tuple[object, str]]:
        transformer = self._transformer
        passes = [(transformer, name) for name in ("condition", "rotation", "embed", "logits")]
        return [*passes, *((block, "forward") for block in transformer.layers)]

    def key_rotation(self) -> Tensor:
        """Return the RoPE factors of keys, complex64 [positions, D/2]."""
        config, grid = self.transformer, self.transformer.rope_grid
        assert grid is not None
        return compute_rotations(self.spec.segments, grid, self.spec.head_dim, config.rope_base, "cpu")

    def output_projection(self, layer: int) -> Tensor:
        """Return W_o of a layer of the loaded model, [width, query heads x D]."""
        return self._transformer.layers[layer].sa.proj.weight

    @property
    def _cleans(self) -> dict[str, Clean]:
        return {"transformer": clean_transformer, "tokenizer": clean_tokenizer}

    def _find_dtype(self, name: str, device: torch.device | str) -> torch.dtype:
        return self.compute_dtype(device) if name.startswith(("blocks.", "block_chunks.")) else torch.float32

    def _draw(
        self, prompts: Sequence[str], cache: Cache, noise: Noise, forced: ForcedScales | None = None
    ) -> Tensor:
        text = self._text.encode(
            [add_positive_prompt(prompt) for prompt in prompts] if self.positive_prompt else prompts
        )
        negative = self._text.encode([self.negative_prompt] * len(prompts)) if self.negative_prompt else None
        return draw_bit_scales(
            self._transformer,
            self._tokenizer,
            text,
            self.spec.segments,
            cache,
            noise,
            self.sampling,
            negative=negative,
            activations=self.activation_bytes(len(prompts)),
            forced=forced,
        )

    def _read_text(self, device: torch.device | str) -> tuple[TextEncoder, str]:
        if self.text == "vocabulary":
            return load_vocabulary(self._source("text"), self.text_config, self.vocabulary.tokenize, device)
        if self.weights == "random":
            return HashedText(self.transformer.text_width, device, self.transformer.text_maxlen), ""
        return load_t5(self.sources["text"], device, longest=self.transformer.text_maxlen)
