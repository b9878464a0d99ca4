"""Lumina-mGPT as the harness sees it: shapes without weights, then prompts to images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.files import hash_content
from kvbench.core.segments import ModelSpec
from kvbench.models.autoencoder import count_decoding_bytes, decode_pixels
from kvbench.models.base import Cache, Calls, Model, require_positive
from kvbench.models.llamagen.loop import generate
from kvbench.models.lumina.files import clean_chameleon, clean_lumina
from kvbench.models.lumina.prompt import HashedTokens, Tokenizer, lay_out, read_tokenizer
from kvbench.models.lumina.sampling import LuminaSampling
from kvbench.models.lumina.tokenizer import Chameleon, ChameleonConfig
from kvbench.models.lumina.transformer import Lumina, LuminaConfig
from kvbench.models.noise import Noise
from kvbench.models.tokens import encode_prompts
from kvbench.models.weights import Source, build_on_meta, check_sources, fill


@dataclass
class LuminaModel(Model):
    """Lumina-mGPT at any image size: settings now, weights on `load`.

    Prompts are padded in front to a room of `prompt_tokens` tokens; the unconditional branch has the three that begin
    an image. Positions count from the room's first token: what is attended to depends on their differences alone, but
    for the rounding of cosines and sines.

    Differs from the official program in: every image has the size asked for, its first tokens being part of the prompt
    instead of drawn; nothing is drawn behind an image; in bfloat16, keys are rounded when they are cached instead of at
    every use, which gives the same numbers in two thirds of the bytes, and cosines and sines are rounded at positions
    that count the padding; it takes several prompts at once.

    Attributes:
        name: as in `conf/model`.
        transformer: shape of the language model, and of its images.
        tokenizer: shape of the image tokenizer, which is Chameleon's.
        sampling: guidance and truncation.
        sources: where `weights` (language model), `tokenizer` (image tokenizer) and `text` (`tokenizer.json`) come
            from.
        weights: `files`, or `random` numbers in the model's shape (a hash in place of the text's tokenizer), for timing
            and tests.
        prompt_tokens: tokens of the longest prompt, special ones and the three that begin an image included.
        chunk: tokens after which a method is asked what to keep; None for a line of the image, its newline included.
        default_sinks: sink segments when the config names none; the prompt is the first segment.
    """

    name: str
    transformer: LuminaConfig
    tokenizer: ChameleonConfig
    sampling: LuminaSampling
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
            check_sources(self.sources, "weights", "tokenizer", "text")

    @cached_property
    def spec(self) -> ModelSpec:
        """Shapes and schedule, without weights."""
        segments, branches = self.transformer.segments(self.prompt_tokens, self.chunk), self.sampling.branches
        return self.transformer.describe(self.name, segments, branches, equal_branches=branches == 1)

    @property
    def parameters(self) -> int:
        """Parameters of language model and image decoder, counted on the meta device."""
        return sum(p.numel() for module in self._build() for p in module.parameters())

    def activation_bytes(self, prompts: int) -> int:
        """Return the bytes beside weights and cache that drawing holds at its worst instant on a GPU.

        That is in a layer over the prompts, or while a token is drawn.
        """
        config, sequences = self.transformer, prompts * self.sampling.branches
        return max(
            config.count_layer_bytes(sequences * self.prompt_tokens),
            6 * 4 * sequences * config.vocabulary,
        )

    def decoding_bytes(self, prompts: int) -> int:
        """Return the bytes beside weights that decoding holds at its worst instant on a GPU."""
        rows, columns = self.transformer.image
        return count_decoding_bytes(self.tokenizer.networks, prompts, rows * columns)

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
        digests = [
            fill(transformer, self._source("weights"), partial(clean_lumina, config=self.transformer)),
            fill(tokenizer, self._source("tokenizer"), clean_chameleon),
        ]
        self._text, read = self._read_text()
        self._transformer = transformer.to(device, self.compute_dtype(device))
        self._tokenizer = tokenizer.to(device)
        missing = self.transformer.vocabulary - len(self._text.codes)
        self._codes = F.pad(self._text.codes, (0, missing), value=-1).to(device)
        self._device = device
        self.weights_sha256 = hash_content("".join([*digests, *read]))

    def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> Tensor:
        """Return images uint8 [B, H, W, 3] RGB of a batch; decoded in float32, rounded down.

        Raises:
            NotFinite: the model produced NaN or infinite logits.
            ValueError: a prompt of more than `prompt_tokens` tokens.
        """
        config = self.transformer
        rows, padding = lay_out(prompts, self._text, self.prompt_tokens, guided=self.sampling.branches > 1)
        with torch.inference_mode():
            tokens = generate(
                self._transformer,
                self._transformer.embed(rows.to(self._device)),
                self.spec.segments,
                cache,
                noise,
                self.sampling,
                padding=padding,
                forbidden=forbid(self._codes, self._text.marks.newline, config.line),
                activations=self.activation_bytes(len(prompts)),
            )
            drawn = tokens.unflatten(1, (-1, config.line))[..., :-1]
            codes = self._tokenizer.codes(self._codes[drawn])
            cache.release()
            return decode_pixels(self._decode, codes, self.tokenizer.networks.patch, truncate=True)

    def _decode(self, codes: Tensor) -> Tensor:
        return self._tokenizer.decode(codes).clamp(-1, 1)

    def _build(self) -> tuple[Lumina, Chameleon]:
        return build_on_meta(lambda: Lumina(self.transformer)), build_on_meta(
            lambda: Chameleon(self.tokenizer)
        )

    def _read_text(self) -> tuple[Tokenizer, list[str]]:
        if self.weights == "random":
            return HashedTokens(self.transformer), []
        tokenizer, digest = read_tokenizer(self.sources["text"], self.transformer)
        return tokenizer, [digest]

    def _source(self, part: str) -> Source | None:
        return None if self.weights == "random" else self.sources[part]


def forbid(codes: Tensor, newline: int, line: int) -> Callable[[int], Tensor]:
    """Return what tells which tokens an image's next token cannot be: bool [tokens] by its number, from 0.

    Args:
        codes: int64 [tokens], the code that each token stands for, -1 where it is none.
        newline: the token that ends a line, and stands nowhere else.
        line: tokens of a line, its newline included.
    """
    others, words = torch.arange(len(codes), device=codes.device) != newline, codes < 0
    return lambda token: words if (token + 1) % line else others
