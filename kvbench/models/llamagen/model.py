"""LlamaGen as the harness sees it: shapes without weights, then classes or captions to images."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from kvbench.core.files import hash_content
from kvbench.core.segments import ModelSpec
from kvbench.models.autoencoder import count_decoding_bytes, decode_pixels
from kvbench.models.base import Cache, Calls, Model, read_labels, require_positive
from kvbench.models.llamagen.captions import clean_caption, require_cleaning
from kvbench.models.llamagen.loop import generate
from kvbench.models.llamagen.sampling import LlamaGenSampling
from kvbench.models.llamagen.tokenizer import VQ, VQConfig
from kvbench.models.llamagen.transformer import LlamaGen, LlamaGenConfig
from kvbench.models.noise import Noise
from kvbench.models.text import HashedText, TextEncoder, VocabularyConfig, load_t5, load_vocabulary
from kvbench.models.weights import (
    Source,
    build_on_meta,
    check_sources,
    clean_decoder,
    clean_vqgan,
    fill,
)
from kvbench.scenes import grammar


@dataclass
class LlamaGenModel(Model):
    """LlamaGen at any size: settings now, weights on `load`.

    A prompt is a caption, or, of a model without text, a class number, -1 for no class; words after it (the class's
    name) are for people.

    Attributes:
        name: as in `conf/model`.
        transformer: shape of the transformer, grid of image tokens included.
        tokenizer: shape of the tokenizer.
        sampling: guidance and truncation.
        sources: where `transformer`, `tokenizer` and, of a model with text, `text` come from.
        weights: `files`, or `random` numbers in the model's shape (random features in place of Flan-T5), for timing and
            tests.
        text: `t5` (Flan-T5 through transformers; captions are cleaned and padded in front, as officially), `vocabulary`
            (the scenes grammar's closed vocabulary, captions filled up with its end); None: images are drawn by class.
        text_layers: layers of the vocabulary encoder.
        text_heads: heads of the vocabulary encoder.
        chunk: tokens after which a method is asked what to keep; None for a row of the image.
        default_sinks: sink segments when the config names none; the condition is the first segment.
    """

    name: str
    transformer: LlamaGenConfig
    tokenizer: VQConfig
    sampling: LlamaGenSampling
    sources: dict[str, Source]
    weights: Literal["files", "random"] = "files"
    text: Literal["t5", "vocabulary"] | None = None
    text_layers: int = 2
    text_heads: int = 4
    chunk: int | None = None
    default_sinks: int = 1

    def __post_init__(self) -> None:
        ours, theirs = self.transformer.vocabulary, self.tokenizer.codes
        if ours != theirs:
            raise ValueError(f"model.transformer.vocabulary={ours}: model.tokenizer.codes is {theirs}")
        if (self.text is None) != (self.transformer.text_width is None):
            raise ValueError(
                f"model.text={self.text}: model.transformer.text_width is {self.transformer.text_width}; "
                "give both for captions, neither for classes"
            )
        if self.chunk is not None:
            require_positive("model", chunk=self.chunk)
        if self.weights == "files":
            check_sources(self.sources, "transformer", "tokenizer", *(["text"] if self.text else []))

    @cached_property
    def spec(self) -> ModelSpec:
        """Shapes and schedule, without weights."""
        segments = self.transformer.segments(self.chunk)
        return self.transformer.describe(self.name, segments, self.sampling.branches)

    @property
    def text_config(self) -> VocabularyConfig:
        """Shape of the closed-vocabulary encoder, of a model with text."""
        config = self.transformer
        assert config.text_width is not None
        return VocabularyConfig(
            len(grammar.VOCABULARY), config.text_tokens, config.text_width, self.text_layers, self.text_heads
        )

    @property
    def parameters(self) -> int:
        """Parameters of transformer and tokenizer, counted on the meta device."""
        return sum(p.numel() for module in self._build() for p in module.parameters())

    def activation_bytes(self, prompts: int) -> int:
        """Return the bytes beside weights and cache that drawing holds at its worst instant on a GPU.

        That is in a layer over the condition, or while a token is drawn.
        """
        config, sequences = self.transformer, prompts * self.sampling.branches
        return max(
            config.count_layer_bytes(sequences * config.condition),
            6 * 4 * sequences * config.vocabulary,
        )

    def decoding_bytes(self, prompts: int) -> int:
        """Return the bytes beside weights that decoding holds at its worst instant on a GPU."""
        return count_decoding_bytes(self.tokenizer.networks, prompts, self.transformer.tokens)

    @property
    def calls(self) -> Calls:
        """Calls of the loaded model that a profiler may watch."""
        passes = [(self._transformer.cls_embedding, "forward"), (self._transformer, "forward")]
        return {
            "text": [] if self._text is None else [(self._text, "encode")],
            "transformer": [*passes, (self._transformer, "logits")],
            "decode": [(self._tokenizer, "decode")],
        }

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Make sure that every prompt names a class, if images are drawn by class.

        Raises:
            ValueError: naming the first one that does not.
        """
        if self.text is None:
            read_labels(prompts, self.transformer.classes, self.name)

    def key_rotation(self) -> Tensor:
        """Return what keys are turned by at every position, complex64 [positions, D/2], for storage in few bits."""
        return self.transformer.rotations(self.spec.segments[-1].end + 1)

    def output_projection(self, layer: int) -> Tensor:
        """Return W_o of a layer of the loaded model, [width, query heads x D], for methods that ask a view for it."""
        return self._transformer.output_projection(layer)

    def load(self, device: torch.device | str) -> None:
        """Build the networks and fill them: the transformer in float32 on a CPU and bf16 on a GPU, as officially.

        Raises:
            WeightsError: a checkpoint is missing, unreadable or does not fit.
        """
        self._transformer, self._tokenizer = self._build()
        digests = [
            fill(self._transformer, self._source("transformer"), clean_decoder),
            fill(self._tokenizer, self._source("tokenizer"), clean_vqgan),
        ]
        self._text, read = self._load_text(device)
        digests += read
        self._transformer.to(device, self.compute_dtype(device))
        self._tokenizer.to(device)
        self._device = device
        self.weights_sha256 = hash_content("".join(digests))

    def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> Tensor:
        """Return images uint8 [B, H, W, 3] RGB of a batch; decoded in float32, rounded half to even.

        Raises:
            NotFinite: the model produced NaN or infinite logits.
            ValueError: a prompt that names no class, or that the text encoder cannot read.
        """
        with torch.inference_mode():
            read, padding = self._read(prompts)
            condition = self._transformer.cls_embedding(read, guided=self.sampling.branches > 1)
            tokens = generate(
                self._transformer,
                condition,
                self.spec.segments,
                cache,
                noise,
                self.sampling,
                padding=None if padding is None else padding * self.sampling.branches,
                activations=self.activation_bytes(len(prompts)),
            )
            codes = self._tokenizer.codes(tokens.unflatten(1, self.transformer.grid))
            cache.release()
            return decode_pixels(self._decode, codes, self.tokenizer.networks.patch)

    def _read(self, prompts: Sequence[str]) -> tuple[Tensor, list[int] | None]:
        """Read prompts as the condition's embedding wants them: classes int64 [B], or features of captions.

        Tokens in front of the captions that do not exist come second, None where there are none. No caption, the other
        branch, has as many as the caption whose branch it is.
        """
        if self._text is None:
            labels = read_labels(prompts, self.transformer.classes, self.name)
            return torch.tensor(labels, device=self._device), None
        room, dtype = self.transformer.text_tokens, self._transformer.output.weight.dtype
        if self.text == "vocabulary":
            return self._text.encode(prompts).pad(room)[0].to(dtype), None
        captions = prompts if self.weights == "random" else [clean_caption(prompt) for prompt in prompts]
        text = self._text.encode(captions)
        return text.pad(room, front=True)[0].to(dtype), [room - length for length in text.lengths]

    def _decode(self, codes: Tensor) -> Tensor:
        return self._tokenizer.decode(codes).clamp(-1, 1)

    def _build(self) -> tuple[LlamaGen, VQ]:
        return build_on_meta(lambda: LlamaGen(self.transformer)), build_on_meta(lambda: VQ(self.tokenizer))

    def _load_text(self, device: torch.device | str) -> tuple[TextEncoder | None, list[str]]:
        if self.text is None:
            return None, []
        config = self.transformer
        if self.text == "vocabulary":
            source = self._source("text")
            encoder, digest = load_vocabulary(source, self.text_config, grammar.tokenize_filled, device)
        elif self.weights == "random":
            assert config.text_width is not None
            return HashedText(config.text_width, device, config.text_tokens), []
        else:
            require_cleaning()
            half = self.compute_dtype(device)
            encoder, digest = load_t5(self.sources["text"], device, half, config.text_tokens)
        return encoder, [digest]

    def _source(self, part: str) -> Source | None:
        return None if self.weights == "random" else self.sources[part]
