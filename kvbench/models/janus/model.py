"""Janus-Pro as the harness sees it: shapes without weights, then prompts to images."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor, nn

from kvbench.core.files import hash_content
from kvbench.core.segments import ModelSpec
from kvbench.models.autoencoder import count_decoding_bytes, decode_pixels
from kvbench.models.base import Cache, Calls, Model, require_positive
from kvbench.models.janus.files import clean_janus
from kvbench.models.janus.prompt import HashedTokens, Tokenizer, lay_out, read_tokenizer
from kvbench.models.janus.transformer import Janus, JanusConfig
from kvbench.models.llamagen.loop import generate
from kvbench.models.llamagen.sampling import LlamaGenSampling
from kvbench.models.llamagen.tokenizer import VQ, VQConfig
from kvbench.models.noise import Noise
from kvbench.models.tokens import encode_prompts
from kvbench.models.weights import Source, build_on_meta, check_sources, fill


@dataclass
class JanusModel(Model):
    """Janus-Pro at any size: settings now, weights on `load`.

    Prompts are padded in front to a room of `prompt_tokens`. Positions count from the room's first token: what is
    attended to depends on their differences alone.

    Differs from the official program in: it rotates in float32, decodes in float32, and takes several prompts at once.

    Attributes:
        name: as in `conf/model`.
        transformer: shape of the language model.
        tokenizer: shape of the image tokenizer, which is LlamaGen's.
        sampling: guidance and truncation.
        sources: where `weights` (language model and image tokenizer) and `text` (`tokenizer.json`) come from.
        weights: `files`, or `random` numbers in the model's shape (a hash in place of the text's tokenizer), for timing
            and tests.
        prompt_tokens: tokens of the longest prompt, special ones included.
        chunk: tokens after which a method is asked what to keep; None for a row of the image.
        default_sinks: sink segments when the config names none; the prompt is the first segment.
    """

    name: str
    transformer: JanusConfig
    tokenizer: VQConfig
    sampling: LlamaGenSampling
    sources: dict[str, Source]
    weights: Literal["files", "random"] = "files"
    prompt_tokens: int = 64
    chunk: int | None = None
    default_sinks: int = 1

    def __post_init__(self) -> None:
        ours, theirs = self.transformer.codes, self.tokenizer.codes
        if ours != theirs:
            raise ValueError(f"model.transformer.codes={ours}: model.tokenizer.codes is {theirs}")
        require_positive("model", prompt_tokens=self.prompt_tokens)
        if self.chunk is not None:
            require_positive("model", chunk=self.chunk)
        if self.weights == "files":
            check_sources(self.sources, "weights", "text")

    @cached_property
    def spec(self) -> ModelSpec:
        """Shapes and schedule, without weights."""
        segments = self.transformer.segments(self.prompt_tokens, self.chunk)
        return self.transformer.describe(self.name, segments, self.sampling.branches)

    @property
    def parameters(self) -> int:
        """Parameters of language model and image tokenizer, counted on the meta device."""
        return sum(p.numel() for module in self._build() for p in module.parameters())

    def activation_bytes(self, prompts: int) -> int:
        """Return the bytes beside weights and cache that drawing holds at its worst instant on a GPU.

        That is in a layer over the prompts, or while a token is drawn.
        """
        config, sequences = self.transformer, prompts * self.sampling.branches
        return max(
            config.count_layer_bytes(sequences * self.prompt_tokens),
            6 * 4 * sequences * config.codes,
        )

    def decoding_bytes(self, prompts: int) -> int:
        """Return the bytes beside weights that decoding holds at its worst instant on a GPU."""
        return count_decoding_bytes(self.tokenizer.networks, prompts, self.transformer.tokens)

    @property
    def calls(self) -> Calls:
        """Calls of the loaded model that a profiler may watch."""
        return {
            "text": [(self._text, "encode")],
            "transformer": [(self._transformer, name) for name in ("embed", "forward", "logits")],
            "decode": [(self._tokenizer, "decode")],
        }

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Make sure that every prompt fits.

        Raises:
            ValueError: naming the longest one, and the room that it needs.
            WeightsError: the text's tokenizer is missing.
        """
        encode_prompts(prompts, self._read_text()[0], self.prompt_tokens)

    def key_rotation(self) -> Tensor:
        """Return what keys are turned by at every position, complex64 [positions, D/2], for storage in few bits."""
        return self.transformer.rotations(self.spec.segments[-1].end + 1)

    def output_projection(self, layer: int) -> Tensor:
        """Return W_o of a layer of the loaded model, [width, query heads x D], for methods that ask a view for it."""
        return self._transformer.output_projection(layer)

    def load(self, device: torch.device | str) -> None:
        """Build the networks and fill them: the language model in float32 on a CPU and bf16 on a GPU, as officially.

        Raises:
            WeightsError: a checkpoint is missing, unreadable or does not fit.
        """
        transformer, tokenizer = self._build()
        both = nn.ModuleDict({"transformer": transformer, "tokenizer": tokenizer})  # one file has both
        source = None if self.weights == "random" else self.sources["weights"]
        digest = fill(both, source, partial(clean_janus, head_dim=self.transformer.head_dim))
        self._text, read = self._read_text()
        self._transformer = transformer.to(device, self.compute_dtype(device))
        self._tokenizer = tokenizer.to(device)
        self._device = device
        self.weights_sha256 = hash_content("".join([digest, *read]))

    def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> Tensor:
        """Return images uint8 [B, H, W, 3] RGB of a batch; decoded in float32, rounded down.

        Raises:
            NotFinite: the model produced NaN or infinite logits.
            ValueError: a prompt of more than `prompt_tokens` tokens.
        """
        rows, padding = lay_out(prompts, self._text, self.prompt_tokens, guided=self.sampling.branches > 1)
        with torch.inference_mode():
            tokens = generate(
                self._transformer,
                self._transformer.tok_embeddings(rows.to(self._device)),
                self.spec.segments,
                cache,
                noise,
                self.sampling,
                padding=padding,
                activations=self.activation_bytes(len(prompts)),
            )
            codes = self._tokenizer.codes(tokens.unflatten(1, self.transformer.image))
            cache.release()
            return decode_pixels(self._decode, codes, self.tokenizer.networks.patch, truncate=True)

    def _decode(self, codes: Tensor) -> Tensor:
        return self._tokenizer.decode(codes).clamp(-1, 1)

    def _build(self) -> tuple[Janus, VQ]:
        return build_on_meta(lambda: Janus(self.transformer)), build_on_meta(lambda: VQ(self.tokenizer))

    def _read_text(self) -> tuple[Tokenizer, list[str]]:
        if self.weights == "random":
            return HashedTokens(self.transformer.vocabulary), []
        tokenizer, digest = read_tokenizer(self.sources["text"])
        return tokenizer, [digest]
