"""Interface of models that can read given tokens (forced decoding)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kvbench.core.segments import ModelSpec, Segment
from kvbench.models.base import Cache, Model
from kvbench.models.noise import Noise
from kvbench.models.text_tokens import TextTokenizer


class PassedText(NamedTuple):
    """A text, or the tokens of an image, after a pass of the model.

    Attributes:
        tokens: int64 [n], its scored tokens, or bool [n, bits].
        states: hidden states [n, ...] that predict them.
    """

    tokens: Tensor
    states: Tensor


class OwnReadable(Model, ABC):
    """Base class of models that can read what they have drawn."""

    @abstractmethod
    def read_own(
        self, prompts: Sequence[str], cache: Cache, noise: Noise, tokens: Sequence[Tensor] | None
    ) -> list[PassedText]:
        """Read the outputs of prompts, which are drawn first if `tokens` is None.

        Args:
            prompts: a batch of prompts.
            cache: cache of keys and values.
            noise: randomness, per prompt, of the draw.
            tokens: tokens int64 [n] of each output; None to draw them.

        Raises:
            ValueError: the model's sampling does not draw tokens.
        """

    @abstractmethod
    def find_logits(self, states: Tensor, number: int) -> Tensor:
        """Return logits float32 [n, vocabulary], or [n, bits, 2], of hidden states [n, ...].

        `number` is the number of the first token among those that are scored.
        """

    def spell_tokens(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """Return the characters of each token; nothing for an image."""
        return ()


class ReadableModel(OwnReadable):
    """Base class of language models, which can read any text.

    Attributes:
        chunk: number of tokens between two decisions of a method.
    """

    chunk: int

    @abstractmethod
    def open_tokenizer(self) -> TextTokenizer:
        """Return the tokenizer, before weights are loaded.

        Raises:
            WeightsError: the tokenizer is missing.
        """

    @abstractmethod
    def describe(self, segments: tuple[Segment, ...]) -> ModelSpec:
        """Return the shapes with a schedule.

        Raises:
            ConfigError: it is longer than the model reads.
        """

    @abstractmethod
    def read_states(
        self, rows: Tensor, segments: Sequence[Segment], cache: Cache, padding: Sequence[int], first: int
    ) -> Tensor:
        """Read tokens segment by segment; return hidden states [texts, tokens - first, ...].

        Args:
            rows: tokens of the texts, int64 [texts, tokens].
            segments: segments of the tokens.
            cache: cache of keys and values.
            padding: number of padding tokens in front of each text.
            first: position of the first token whose state is returned.
        """

    @abstractmethod
    def rotate(self, length: int) -> Tensor:
        """Return the RoPE factors of the keys of `length` tokens, complex64 [length, D/2]."""
