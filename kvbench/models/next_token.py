"""Base classes of next-token models, whose decoder generates texts or images token by token."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.segments import ModelSpec, Segment
from kvbench.forced.passes import ForcedPass, OwnReadable
from kvbench.models.base import Cache, Model, require_sizes
from kvbench.models.image_model import ImageModel
from kvbench.models.noise import Noise
from kvbench.models.parts.codebook import VQGAN, VQGANConfig
from kvbench.models.parts.config_file import check_config, expect_decoder
from kvbench.models.parts.decoder import (
    Decoder,
    DecoderConfig,
    ImageDecoderConfig,
    LinedImageConfig,
    PromptedImageConfig,
)
from kvbench.models.parts.decoding import Rounding
from kvbench.models.parts.image_prompts import forbid
from kvbench.models.parts.sampling import TokenSampling, guide
from kvbench.models.parts.tensor_parallel import split_config
from kvbench.models.parts.tokens import encode_prompts, lay_out
from kvbench.models.token_loop import ImageHead, draw_tokens, read_tokens

N = TypeVar("N", bound=Decoder)
T = TypeVar("T", bound=VQGAN)


class NextTokenModel(Model, Generic[N]):
    """Base of models that generate texts or images token by token.

    Attributes:
        transformer: shape of the decoder.
        prompt_tokens: capacity for prompts, which are padded in front to this length.
    """

    transformer: DecoderConfig
    prompt_tokens: int
    _transformer: N

    @abstractmethod
    def _read_text(self, device: torch.device | str) -> tuple[Any, str]:
        """Return the encoder of prompts, None for classes, and the SHA-256 of its file, empty without one."""

    @property
    def shape(self) -> DecoderConfig:
        """Shape of the decoder."""
        return self.transformer

    @property
    def _passes(self) -> list[tuple[object, str]]:
        """Calls of the decoder that a profiler can time."""
        return [(self._transformer, name) for name in ("embed", "forward", "logits")]

    def activation_bytes(self, prompts: int) -> int:
        """Return the peak bytes of a generation on a GPU without weights and cache.

        The peak is in a layer over the prompts or in sampling a token, with six tensors of logits in float32.
        """
        config = split_config(self.shape, self.processes.count)
        sequences = prompts * self.spec.branches
        layer = config.count_layer_bytes(sequences * self.spec.segments[0].length)
        return max(layer, 6 * 4 * sequences * config.choices)

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Check that every prompt fits.

        Raises:
            ValueError: a prompt is too long; the message names the longest one and its number of tokens.
            WeightsError: the tokenizer is missing.
        """
        encode_prompts(prompts, self._read_text("cpu")[0], self.prompt_tokens)

    def key_rotation(self) -> Tensor:
        """Return the RoPE factors of keys, complex64 [positions, D/2]."""
        return self.shape.rotations(self.spec.segments[-1].end + 1)

    def output_projection(self, layer: int) -> Tensor:
        """Return W_o of a layer of the loaded model, [width, query heads x D]."""
        return self._transformer.get_parameter(f"layers.{layer}.attention.wo.weight")


@dataclass
class NextTokenImageModel(NextTokenModel[N], ImageModel[N, T], OwnReadable):
    """Settings of a model that generates an image's codes token by token; `ImageModel` has further settings.

    Attributes:
        chunk: number of tokens between two decisions of a method; None for a row of the image.
        default_sinks: number of sink segments if the configuration names none; the prompt is the first segment.
    """

    transformer: ImageDecoderConfig
    tokenizer: VQGANConfig
    sampling: TokenSampling
    chunk: int | None = None
    default_sinks: int = 1

    equal_branches: ClassVar[bool] = True  # the unconditional prompt is as long as the conditional one

    def __post_init__(self) -> None:
        if self.chunk is not None:
            require_sizes("model", self, "chunk")

    def _check_codes(self, name: str, codes: int) -> None:
        if codes != self.tokenizer.codes:
            raise ValueError(
                f"model.transformer.{name}={codes}: must be model.tokenizer.codes={self.tokenizer.codes}"
            )

    @property
    @abstractmethod
    def _segments(self) -> tuple[Segment, ...]:
        """Segments of the prompt and of the image."""

    @cached_property
    def spec(self) -> ModelSpec:
        """Shapes and schedule, without weights."""
        branches = self.sampling.branches
        equal = self.equal_branches or branches == 1
        return self.transformer.describe(self.name, self._segments, branches, equal_branches=equal)

    @property
    def cells(self) -> int:
        """Number of codes of an image."""
        return prod(self.transformer.cells)

    @abstractmethod
    def _embed(self, prompts: Sequence[str]) -> tuple[Tensor, Sequence[int] | None]:
        """Return embedded prompts [sequences, tokens, width], and the padding tokens in front of each, or None."""

    def _forbid(self) -> Callable[[int], Tensor] | None:
        """Return the argument `forbidden` of `ImageHead`; None if every code is allowed."""
        return None

    def _find_codes(self, tokens: Tensor) -> Tensor:
        """Return the codes int64 [B, rows, columns] of generated tokens int64 [B, tokens]."""
        return tokens.unflatten(1, self.transformer.cells)

    def _prepare_networks(self, device: torch.device | str) -> None:
        super()._prepare_networks(device)
        self._transformer.prepare_for(device)

    def _draw(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> Tensor:
        tokens = self._draw_tokens(*self._embed(prompts), cache, noise)
        return self._tokenizer.codes(self._find_codes(tokens))

    def _draw_tokens(
        self, condition: Tensor, padding: Sequence[int] | None, cache: Cache, noise: Noise
    ) -> Tensor:
        """Generate tokens int64 [B, tokens] after the embedded prompts of `_embed`."""
        head = ImageHead(self.sampling, self._forbid())
        activations = self.activation_bytes(len(condition) // head.branches)
        given = (self._transformer, condition, self.spec.segments, cache, noise, head)
        return draw_tokens(*given, padding=padding, activations=activations).tokens

    @torch.inference_mode()
    def read_own(
        self, prompts: Sequence[str], cache: Cache, noise: Noise, tokens: Sequence[Tensor] | None
    ) -> list[ForcedPass]:
        """Run the model over images, which are sampled if `tokens` is None; states are [tokens, branches, width]."""
        condition, padding = self._embed(prompts)
        branches, first = self.sampling.branches, condition.shape[1]
        if tokens is None:
            drawn = self._draw_tokens(condition, padding, cache, noise)
        else:
            drawn = torch.stack(list(tokens)).to(self._device)
        image = self._transformer.embed(drawn[:, :-1]).repeat(branches, 1, 1)

        def embed(start: int, end: int) -> Tensor:
            return image[:, start - first : end - first] if start else condition

        length = first + image.shape[1]
        states = read_tokens(self._transformer, embed, length, self.spec.segments, cache, padding, first - 1)
        states = states.unflatten(0, (branches, -1)).permute(1, 2, 0, 3)
        return [ForcedPass(row, state) for row, state in zip(drawn, states, strict=True)]

    def find_logits(self, states: Tensor, first: int) -> Tensor:
        """Return guided logits float32 [n, codes] of states [n, branches, width], before temperature and truncation.

        `first` is the index of the first token. Forbidden codes have -inf.
        """
        logits, forbid = self._transformer.logits(states), self._forbid()
        rows = []
        for token, row in enumerate(logits, first):
            guided = guide(row, self.sampling, token)[0]
            rows.append(guided if forbid is None else guided.masked_fill(forbid(token), -torch.inf))
        return torch.stack(rows)


@dataclass
class PromptedImageModel(NextTokenImageModel[N, T]):
    """Settings of a next-token image model whose prompts are tokens of the same decoder.

    Positions count from the first padding token, because attention depends on their differences alone.

    Attributes:
        prompt_tokens: tokens of the longest prompt, special ones included; shorter prompts are padded in front.
    """

    transformer: PromptedImageConfig
    prompt_tokens: int = 64
    rounding: Rounding = "truncate"

    config_section: ClassVar[str] = ""  # section of the language model in config.json

    def __post_init__(self) -> None:
        self._check_codes("codes", self.transformer.codes)
        super().__post_init__()
        require_sizes("model", self, "prompt_tokens")
        self._check_sources("text")

    def check_files(self) -> None:
        """Compare the `config.json` of the language model, if its files have one, with the settings."""
        if "weights" in (sources := self.list_sources()):
            check_config(sources["weights"], expect_decoder(self.transformer), self.config_section)

    @property
    def _segments(self) -> tuple[Segment, ...]:
        return self.transformer.segments(self.prompt_tokens, self.chunk)

    def _embed(self, prompts: Sequence[str]) -> tuple[Tensor, Sequence[int]]:
        rows, padding = lay_out(prompts, self._text, self.prompt_tokens, guided=self.sampling.branches > 1)
        return self._transformer.tok_embeddings(rows.to(self._device)), padding


@dataclass
class LinedImageModel(PromptedImageModel[N, T]):
    """Settings of a model with one vocabulary for words and image codes, whose image lines end in a newline token.

    Only codes, and a newline at the end of a line, can be sampled. The tokens that begin an image are part of
    `prompt_tokens`. The unconditional and the conditional prompt may differ in length.
    """

    transformer: LinedImageConfig

    equal_branches: ClassVar[bool] = False

    def load(self, device: torch.device | str) -> None:
        """Build and fill the networks as `ImageModel.load`, and map each token to its image code."""
        super().load(device)
        missing = self.transformer.vocabulary - len(self._text.codes)
        self._codes = F.pad(self._text.codes, (0, missing), value=-1).to(device)

    def _forbid(self) -> Callable[[int], Tensor]:
        return forbid(self._codes, self._text.newline, self.transformer.line)

    def _find_codes(self, tokens: Tensor) -> Tensor:
        return self._codes[tokens.unflatten(1, (-1, self.transformer.line))[..., :-1]]
