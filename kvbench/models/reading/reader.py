"""Models that read given tokens instead of generating them (forced decoding)."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from kvbench.core.config import ConfigError, quote_prompt
from kvbench.core.reading import ForcedText
from kvbench.core.segments import ModelSpec
from kvbench.models.base import Cache, Calls, LeastWork, Model
from kvbench.models.files.weights import Source
from kvbench.models.noise import Noise
from kvbench.models.outputs import ReadText
from kvbench.models.reading.base import OwnReadable, PassedText, ReadableModel
from kvbench.models.reading.compare import compare_states, pack_bits
from kvbench.models.reading.scales import list_groups
from kvbench.models.reading.schedule import ForcedSchedule, LaidText, lay_text, measure, plan_schedule
from kvbench.models.text_tokens import TextTokenizer

M = TypeVar("M", bound=OwnReadable)


class Reader(Model, Generic[M]):
    """Base class of models that read; the weights and predictions are of the model `inner`.

    Attributes:
        inner: the model that reads.
        own: whether it reads its own outputs.
    """

    output: ClassVar[str] = "readings"
    own: ClassVar[bool]

    def __init__(self, model: M) -> None:
        if model.processes.count > 1:
            raise ConfigError(
                "model.tensor_parallel: texts are read by one process; set model.tensor_parallel=1"
            )
        self.inner, self.name, self.processes = model, model.name, model.processes

    @abstractmethod
    def read(
        self, prompts: Sequence[str], cache: Cache, noise: Noise, tokens: Sequence[Tensor] | None
    ) -> list[PassedText]:
        """Read a batch.

        Args:
            prompts: prompts of the batch.
            cache: cache of keys and values.
            noise: randomness, per prompt, of what is drawn first.
            tokens: tokens of the full cache's reading; None for that reading itself.
        """

    def compare(self, passed: PassedText, full: Tensor | None) -> ReadText:
        """Compare predictions with the full cache's.

        Args:
            passed: what was read under a method, or under the full cache.
            full: the full cache's hidden states, shaped like `passed.states`; None if these are its own.
        """
        states = passed.states
        other = states if full is None else full.to(states)
        tokens = passed.tokens.to(states.device)
        with torch.inference_mode():
            fields = compare_states(states, other, tokens, self.inner.find_logits)
        numbers = (tokens.int() if tokens.ndim == 1 else pack_bits(tokens)).cpu()
        found = torch.cat([numbers, fields["likeliest"], fields["likeliest_full"]]).unique().tolist()
        return ReadText(
            numbers,
            **fields,
            words=dict(zip(found, self.inner.spell_tokens(found), strict=False)),  # nothing for an image
            groups=list_groups(self.spec, len(numbers)),
            states=states.cpu() if full is None else None,
            drawn=len(numbers) if self.own else None,
        )

    def load(self, device: str) -> None:
        """Load the model unless it is loaded."""
        if not self.inner.weights_sha256:
            self.inner.load(device)

    @property
    def weights_sha256(self) -> str:  # type: ignore[override]  # the model has it
        """SHA-256 of the loaded weights."""
        return self.inner.weights_sha256

    @property
    def identified(self) -> Model:
        """The model whose classes count in a run's identity."""
        return self.inner

    def _describe(self, device: torch.device | str, **reading: object) -> Mapping[str, object]:
        return {**self.inner.resolve_settings(device), "reading": reading}

    def list_sources(self) -> Mapping[str, Source]:
        """Return the sources of weights, by part of the model."""
        return self.inner.list_sources()

    def prepare(self) -> None:
        """Download, convert and stage the model's files."""
        self.inner.prepare()

    def check_files(self) -> None:
        """Compare what local files say of the network with the settings."""
        self.inner.check_files()

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return self.inner.parameters

    @property
    def calls(self) -> Calls:
        """Calls of the loaded model that a profiler can time."""
        return self.inner.calls

    @property
    def least_work(self) -> LeastWork:
        """Work of the model that reads, see `LeastWork`."""
        return self.inner.least_work

    def activation_bytes(self, prompts: int) -> int:
        """Return the peak bytes on a GPU without weights and cache, as of a generation."""
        return self.inner.activation_bytes(prompts)

    def compute_dtype(self, device: torch.device | str) -> torch.dtype:
        """Return the dtype that the blocks compute in."""
        return self.inner.compute_dtype(device)

    def key_rotation(self) -> Tensor | None:
        """Return the RoPE factors of keys, complex64 [positions, D/2]."""
        return self.inner.key_rotation()

    def output_projection(self, layer: int) -> Tensor | None:
        """Return W_o of a layer of the loaded model, [width, query heads x D]."""
        return self.inner.output_projection(layer)


class OwnReader(Reader[OwnReadable]):
    """A model that reads its own outputs, which the full cache's run draws.

    Raises:
        ConfigError: the model cannot read them.
    """

    own: ClassVar[bool] = True

    def __init__(self, model: Model) -> None:
        if not isinstance(model, OwnReadable):
            raise ConfigError(f"prompts=own: {model.name} cannot read its own outputs")
        super().__init__(model)

    @property
    def revision(self) -> int:  # type: ignore[override]  # the model has it
        """Revision of the model whose outputs are drawn and read."""
        return self.inner.revision

    @property
    def unfollowed(self) -> Mapping[str, object]:  # type: ignore[override]  # the model has it
        """Settings of the model's files that its draws do not follow."""
        return self.inner.unfollowed

    @property
    def spec(self) -> ModelSpec:
        """Shapes and schedule of the inner model."""
        return self.inner.spec

    def resolve_settings(self, device: torch.device | str) -> Mapping[str, object]:
        """Return the settings of the model, as the identity of a run has them."""
        return self._describe(device, own=True)

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Check prompts before weights are loaded.

        Raises:
            ValueError: naming a prompt that the model cannot read.
        """
        self.inner.check_prompts(prompts)

    def count_prompt_tokens(self, prompts: Sequence[str]) -> list[int]:
        """Return the tokens of each prompt without padding, as the model that reads counts them."""
        return self.inner.count_prompt_tokens(prompts)

    def read(
        self, prompts: Sequence[str], cache: Cache, noise: Noise, tokens: Sequence[Tensor] | None
    ) -> list[PassedText]:
        """Read a batch of outputs, which are drawn first without `tokens`."""
        return self.inner.read_own(prompts, cache, noise, tokens)

    def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> object:  # type: ignore[override]
        """Return the outputs of a batch, as a calibration sees them."""
        return self.inner.generate(prompts, cache, noise)


class TextReader(Reader[ReadableModel]):
    """A language model that reads the texts of a run's prompts.

    Args:
        model: the model that reads.
        readings: texts of the run, by prompt.
        others: texts of the calibration, by prompt; they follow the run's schedule.

    Raises:
        ConfigError: the model is not a language model.
    """

    own: ClassVar[bool] = False
    unused: ClassVar[tuple[str, ...]] = (
        "sampling", "thinking", "chat", "stop", "prompt_tokens", "max_tokens",
    )  # fmt: skip

    def __init__(
        self, model: Model, readings: Mapping[str, ForcedText], others: Mapping[str, ForcedText]
    ) -> None:
        if not isinstance(model, ReadableModel):
            raise ConfigError(f"prompts: texts are read by language models, and {model.name} is not one")
        super().__init__(model)
        self._readings, self._all = readings, {**others, **readings}
        self._laid: dict[str, LaidText] = {}

    @cached_property
    def schedule(self) -> ForcedSchedule:
        """Common schedule of the texts; the tokenizer is opened only if it decides their number of tokens.

        Raises:
            ValueError: naming a text that has too few tokens.
            WeightsError: the tokenizer is missing.
        """
        texts = [measure(reading) or self._lay(prompt) for prompt, reading in self._readings.items()]
        chunked = next(iter(self._readings.values())).chunked
        return plan_schedule(texts, self.inner.chunk, chunked=chunked)

    @cached_property
    def spec(self) -> ModelSpec:
        """Shapes of the inner model, with the schedule of the texts."""
        return self.inner.describe(self.schedule.segments)

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return self.inner.open_tokenizer()

    def _lay(self, prompt: str) -> LaidText:
        if prompt not in self._laid:
            tokenizer = self._tokenizer
            try:
                self._laid[prompt] = lay_text(
                    self._all[prompt], lambda text, first: tokenizer.encode_part(text, first=first)
                )
            except ValueError as error:
                raise ValueError(f"prompt {quote_prompt(prompt)}: {error}") from None
        return self._laid[prompt]

    def resolve_settings(self, device: torch.device | str) -> Mapping[str, object]:
        """Return the settings of the model and of the texts' schedule, as the identity of a run has them."""
        return self._describe(device, given=self.schedule.given, segments=list(self.spec.lengths))

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Check that every text has the tokens that are read.

        Raises:
            ValueError: naming the first one that does not.
            WeightsError: the tokenizer is missing.
        """
        for prompt in prompts:
            if (given := self._lay(prompt).given) > self.schedule.given:
                raise ValueError(
                    f"prompt {quote_prompt(prompt)}: {given} tokens are given, and {self.schedule.given} in the "
                    "run's texts"
                )

    def read(
        self, prompts: Sequence[str], cache: Cache, noise: Noise, tokens: Sequence[Tensor] | None
    ) -> list[PassedText]:
        """Read a batch of texts; only their prompts decide their tokens."""
        texts, schedule = [self._lay(prompt) for prompt in prompts], self.schedule
        padding, pad, length = schedule.find_padding(texts), self._tokenizer.pad, schedule.length
        rows = torch.tensor(
            [
                [*[pad] * front, *text.tokens, *[pad] * (length - front - len(text.tokens))]
                for text, front in zip(texts, padding, strict=True)
            ]
        )
        states = self.inner.read_states(rows[:, :-1], schedule.segments, cache, padding, schedule.given - 1)
        counts = [len(text.tokens) - text.given for text in texts]
        return [
            PassedText(row[schedule.given : schedule.given + count], state[:count])
            for row, state, count in zip(rows, states, counts, strict=True)
        ]

    def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> list[PassedText]:  # type: ignore[override]
        """Read a batch of texts as a calibration does, without a comparison."""
        return self.read(prompts, cache, noise, None)

    def key_rotation(self) -> Tensor:
        """Return the RoPE factors of keys, complex64 [positions, D/2]."""
        return self.inner.rotate(self.spec.segments[-1].end + 1)
