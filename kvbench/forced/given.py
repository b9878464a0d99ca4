"""Forced decoding of given texts by a language model."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.config import ConfigError, quote_prompt
from kvbench.core.segments import ModelSpec
from kvbench.forced.decoding import ForcedDecoding
from kvbench.forced.passes import ForcedPass
from kvbench.forced.text import ForcedSchedule, ForcedText, TokenizedText, plan_schedule
from kvbench.models.base import Cache, Model
from kvbench.models.noise import Noise
from kvbench.models.text_model import TextModel


class GivenTexts(ForcedDecoding[TextModel]):
    """Forced decoding of the texts of a run's prompts by a language model.

    Args:
        model: the language model.
        texts: texts of the run, by prompt.
        others: texts of the calibration, by prompt; they follow the run's schedule.

    Raises:
        ConfigError: the model is not a language model.
    """

    unused: ClassVar[tuple[str, ...]] = (
        "sampling", "thinking", "chat", "stop", "prompt_tokens", "max_tokens",
    )  # fmt: skip

    def __init__(
        self, model: Model, texts: Mapping[str, ForcedText], others: Mapping[str, ForcedText]
    ) -> None:
        if not isinstance(model, TextModel):
            raise ConfigError(
                f"prompts: texts need a language model, and {model.name} is not one; set model="
            )
        super().__init__(model)
        self._texts, self._all = texts, {**others, **texts}
        self._tokenized: dict[str, TokenizedText] = {}

    @cached_property
    def schedule(self) -> ForcedSchedule:
        """Common schedule of the texts; the tokenizer is opened only if it decides their number of tokens.

        Raises:
            ValueError: a text has too few tokens; the message names it.
            WeightsError: the tokenizer is missing.
        """
        texts = [text.measure() or self._tokenize(prompt) for prompt, text in self._texts.items()]
        chunked = next(iter(self._texts.values())).chunked
        return plan_schedule(texts, self.inner.chunk, chunked=chunked)

    @cached_property
    def spec(self) -> ModelSpec:
        """Shapes of the inner model, with the schedule of the texts."""
        return self.inner.describe(self.schedule.segments)

    def _tokenize(self, prompt: str) -> TokenizedText:
        if prompt not in self._tokenized:
            tokenizer = self.inner.open_tokenizer()
            try:
                self._tokenized[prompt] = self._all[prompt].tokenize(
                    lambda text, first: tokenizer.encode_part(text, first=first)
                )
            except ValueError as error:
                raise ValueError(f"prompt {quote_prompt(prompt)}: {error}") from None
        return self._tokenized[prompt]

    def resolve_settings(self, device: torch.device | str) -> Mapping[str, object]:
        """Return the settings of the model and of the texts' schedule, as the identity of a run has them."""
        reading = {"given": self.schedule.given, "segments": list(self.spec.lengths)}
        return {**self.inner.resolve_settings(device), "reading": reading}

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Check that every text has enough tokens, and no more given ones than the schedule.

        Raises:
            ValueError: a text does not fit; the message names the first one.
            WeightsError: the tokenizer is missing.
        """
        for prompt in prompts:
            if (given := self._tokenize(prompt).given) > self.schedule.given:
                raise ValueError(
                    f"prompt {quote_prompt(prompt)}: {given} tokens are given, more than the {self.schedule.given} "
                    "of the run's texts; shorten it"
                )

    def read(
        self, prompts: Sequence[str], cache: Cache, noise: Noise, tokens: Sequence[Tensor] | None
    ) -> list[ForcedPass]:
        """Run the model over a batch of texts, whose tokens follow from `prompts` alone."""
        texts, schedule = [self._tokenize(prompt) for prompt in prompts], self.schedule
        padding, pad = [schedule.given - text.given for text in texts], self.inner.open_tokenizer().pad
        rows = [[*[pad] * front, *text.tokens] for text, front in zip(texts, padding, strict=True)]
        whole = torch.tensor([[*row, *[pad] * (schedule.length - len(row))] for row in rows])
        states = self.inner.read_states(whole[:, :-1], schedule.segments, cache, padding, schedule.given - 1)
        return [
            ForcedPass(torch.tensor(row[schedule.given :]), state[: len(row) - schedule.given])
            for row, state in zip(rows, states, strict=True)
        ]

    def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> list[ForcedPass]:  # type: ignore[override]
        """Run the model over a batch of texts without a comparison, for a calibration."""
        return self.read(prompts, cache, noise, None)

    def key_rotation(self) -> Tensor:
        """Return the RoPE factors of keys, complex64 [positions, D/2]."""
        return self.inner.shape.rotations(self.spec.segments[-1].end + 1)
