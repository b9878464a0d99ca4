"""VAR as the harness sees it: shapes without weights, then classes to images."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.files import hash_content
from kvbench.core.segments import ModelSpec
from kvbench.models.autoencoder import count_decoding_bytes, decode_pixels
from kvbench.models.base import Cache, Calls, Model, read_labels
from kvbench.models.layers import count_layer_bytes
from kvbench.models.noise import Noise
from kvbench.models.var.loop import generate
from kvbench.models.var.sampling import VARSampling
from kvbench.models.var.tokenizer import VQVAE, VQConfig
from kvbench.models.var.transformer import VAR, VARConfig
from kvbench.models.weights import (
    Source,
    build_on_meta,
    check_sources,
    clean_transformer,
    clean_vqvae,
    fill,
)


@dataclass
class VARModel(Model):
    """VAR at any size: settings now, weights on `load`.

    A prompt is a class number, -1 for no class; words after it (the class's name) are for people.

    Attributes:
        name: as in `conf/model`.
        transformer: shape of the transformer, scale schedule included.
        tokenizer: shape of the tokenizer.
        sampling: guidance and truncation.
        sources: where `transformer` and `tokenizer` come from.
        weights: `files`, or `random` numbers in the model's shape, for timing and tests.
        default_sinks: sink scales when the config names none.
        default_alpha: share of heads that HACK and HACK++ call contextual when the config names none.
        default_tau: how sharply HACK++ shares its budget when the config names nothing.
        half: dtype of the blocks on a GPU, that of the official program's autocast.
    """

    name: str
    transformer: VARConfig
    tokenizer: VQConfig
    sampling: VARSampling
    sources: dict[str, Source]
    weights: Literal["files", "random"] = "files"
    default_sinks: int = 2
    default_alpha: float = 0.15
    default_tau: float = 0.5

    half: ClassVar[torch.dtype] = torch.float16

    def __post_init__(self) -> None:
        for name in ("codes", "channels"):
            ours, theirs = getattr(self.transformer, name), getattr(self.tokenizer, name)
            if ours != theirs:
                raise ValueError(f"model.transformer.{name}={ours}: model.tokenizer.{name} is {theirs}")
        if self.weights == "files":
            check_sources(self.sources, "transformer", "tokenizer")

    @cached_property
    def spec(self) -> ModelSpec:
        """Shapes and schedule, without weights."""
        config = self.transformer
        return ModelSpec(self.name, config.depth, config.heads, config.width // config.heads, config.segments)

    @property
    def parameters(self) -> int:
        """Parameters of transformer and tokenizer, counted on the meta device."""
        return sum(p.numel() for module in self._build() for p in module.parameters())

    def activation_bytes(self, prompts: int) -> int:
        """Return the bytes beside weights and cache that drawing holds at its worst instant on a GPU.

        That is at the last scale, in a layer, while logits of codes are made, or while they are drawn from.
        """
        config, cells = self.transformer, self.spec.segments[-1].length
        rows = 2 * prompts * cells
        logits = 4 * prompts * cells * config.codes
        return max(
            count_layer_bytes(rows, config.width, 4 * config.width),
            rows * config.width * 6
            + 3 * logits,  # the stream and its norm; both branches in bf16 and float32
            5 * logits,  # guided, truncated, probabilities, noise, their quotient
        )

    def decoding_bytes(self, prompts: int) -> int:
        """Return the bytes beside weights that decoding holds at its worst instant on a GPU."""
        return count_decoding_bytes(self.tokenizer.networks, prompts, self.spec.segments[-1].length)

    @property
    def calls(self) -> Calls:
        """Calls of the loaded model that a profiler may watch; there is no text."""
        passes = [(self._transformer, name) for name in ("condition", "scale")]
        return {"transformer": passes, "decode": [(self._tokenizer, "decode")]}

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Make sure that every prompt names a class.

        Raises:
            ValueError: naming the first one that does not.
        """
        read_labels(prompts, self.transformer.classes, self.name)

    def output_projection(self, layer: int) -> Tensor:
        """Return W_o of a layer of the loaded model, [width, query heads x D], for methods that ask a view for it."""
        return self._transformer.layers[layer].attn.proj.weight

    def load(self, device: torch.device | str) -> None:
        """Build the networks and fill them: float32 on a CPU, float16 blocks on a GPU as in the official program.

        Raises:
            WeightsError: a checkpoint is missing, unreadable or does not fit.
        """
        self._transformer, self._tokenizer = self._build()
        digests = [
            fill(self._transformer, self._source("transformer"), clean_transformer),
            fill(self._tokenizer, self._source("tokenizer"), clean_vqvae),
        ]
        self._transformer.to(device)
        self._tokenizer.to(device)
        self._transformer.round_blocks(self.compute_dtype(device))
        self._device = device
        self.weights_sha256 = hash_content("".join(digests))

    def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> Tensor:
        """Return images uint8 [B, H, W, 3] RGB of a batch; decoded in float32, rounded half to even.

        Raises:
            NotFinite: the model produced NaN or infinite logits.
            ValueError: a prompt that names no class.
        """
        labels = torch.tensor(read_labels(prompts, self.transformer.classes, self.name), device=self._device)
        with torch.inference_mode():
            activations = self.activation_bytes(len(prompts))
            summed = generate(
                self._transformer,
                self._tokenizer,
                labels,
                cache,
                noise,
                self.sampling,
                activations=activations,
            )
            cache.release()
            return decode_pixels(self._tokenizer.decode, summed, self.tokenizer.networks.patch)

    def _build(self) -> tuple[VAR, VQVAE]:
        return build_on_meta(lambda: VAR(self.transformer)), build_on_meta(lambda: VQVAE(self.tokenizer))

    def _source(self, part: str) -> Source | None:
        return None if self.weights == "random" else self.sources[part]
