"""Base class of language models: settings and shapes without weights, then prompts to texts."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvbench.core.config import ConfigError
from kvbench.core.devices import release_unused, use_device
from kvbench.core.segments import ModelSpec, Segment, next_token_image
from kvbench.forced.passes import ForcedPass, OwnReadable
from kvbench.models.base import Cache, Calls, LeastWork, require_sizes
from kvbench.models.files.checkpoints import State, WeightsError
from kvbench.models.files.generation_config import list_ignored, read_generation_config
from kvbench.models.files.parameters import build_on_meta, fill_random, load_into
from kvbench.models.files.weights import Source, check_sources, locate_all, prepare
from kvbench.models.next_token import NextTokenModel
from kvbench.models.noise import Noise
from kvbench.models.outputs import Text
from kvbench.models.parts.decoder_files import clean_decoder
from kvbench.models.parts.least_work import count_products
from kvbench.models.parts.tensor_parallel import split_config, split_state
from kvbench.models.parts.text_decoder import TextDecoder, TextDecoderConfig
from kvbench.models.parts.text_sampling import TextSampling
from kvbench.models.parts.tokens import lay_out
from kvbench.models.text_tokens import HashedTextTokenizer, TextTokenizer
from kvbench.models.token_loop import DrawnTexts, TextHead, draw_tokens, read_tokens


@dataclass
class TextModel(NextTokenModel[TextDecoder], OwnReadable):
    """Settings of a language model; weights on `load`.

    Prompts are padded in front to `prompt_tokens` tokens. Positions count from the first padding token, because
    attention depends on their differences alone.

    The length of a text is not known in advance, so a fractional budget refers to the longest sequence:
    `prompt_tokens` and `max_tokens` (without the last chunk, which is never cached). Papers give tokens per head,
    `budget=1024`, which do not depend on `max_tokens`.

    Differs from transformers' code in: rotation is in float32, where transformers rounds cosines and sines to the
    weights' dtype.

    With several processes, each has a share of every layer's heads and hidden channels. All write the same texts, which
    equal one process's texts up to rounding, because sums are in another order.

    Attributes:
        name: name as in `conf/model`.
        transformer: shape of the language model.
        sampling: temperature and truncation.
        sources: source of `weights`, the model's folder with its tokenizer.
        weights: `files`, or `random` values (and a hash in place of the tokenizer), for timing and tests.
        prompt_tokens: tokens of the longest prompt, with its chat template.
        max_tokens: maximum tokens of a text.
        chunk: number of tokens between two decisions of a method.
        thinking: whether the model thinks before it answers, with `chat`.
        chat: whether prompts are put into the chat template; otherwise the model continues them.
        stop: whether the model can end a text; otherwise every text has `max_tokens` tokens, for timing.
        default_sinks: number of sink segments if the configuration names none; the prompt is the first segment.
        count_padding: whether the padding of a short prompt counts in its budget.
        tensor_parallel: number of processes that share the model.
    """

    name: str
    transformer: TextDecoderConfig
    sampling: TextSampling
    sources: dict[str, Source]
    weights: Literal["files", "random"] = "files"
    prompt_tokens: int = 512
    max_tokens: int = 32768
    chunk: int = 128
    thinking: bool = True
    chat: bool = True
    stop: bool = True
    default_sinks: int = 1
    count_padding: bool = False
    tensor_parallel: int = 1

    output: ClassVar[str] = "texts"
    revision: ClassVar[int] = 2  # before, a token that top-k or top-p excludes was sampled once in 2^24 times

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise ValueError(f"model.max_tokens={self.max_tokens}: must be at least 2")
        require_sizes("model", self, "prompt_tokens", "max_tokens", "chunk")
        check_sources(self.weights, self.sources, "weights")

    @property
    def shape(self) -> TextDecoderConfig:
        """Shape of the language model."""
        return self.transformer

    @cached_property
    def spec(self) -> ModelSpec:
        """Shapes and the schedule of the longest text; generation stops when all texts of a batch have ended."""
        return self.describe(next_token_image(self.prompt_tokens, self.max_tokens, self.chunk))

    def describe(self, segments: tuple[Segment, ...]) -> ModelSpec:
        """Return shapes and schedule for `segments`.

        Raises:
            ConfigError: the schedule exceeds the model's maximum sequence length.
        """
        tokens, limit = segments[-1].end + 1, self.shape.context
        if limit is not None and tokens > limit:
            raise ConfigError(
                f"model={self.name}: supports at most {limit} tokens (max_position_embeddings, and a sliding_window "
                f"that is used), not {tokens}; lower model.prompt_tokens, model.max_tokens or, for given texts, "
                "prompts.length or prompts.context"
            )
        return replace(self.shape.describe(self.name, segments, 1), padding_counts=self.count_padding)

    @cached_property
    def ignored_settings(self) -> Mapping[str, object]:  # type: ignore[override]  # computed once
        """Settings of the model's `generation_config.json` that are ignored; may download the model."""
        sources = self.list_sources()
        found = read_generation_config(sources["weights"]) if sources else {}
        return list_ignored(found, asdict(self.sampling))

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, counted on the meta device."""
        return sum(p.numel() for p in build_on_meta(lambda: TextDecoder(self.shape)).parameters())

    @property
    def least_work(self) -> LeastWork:
        """Work of the transformer, counted on the meta device."""
        return count_products(build_on_meta(lambda: TextDecoder(self.shape)))

    @property
    def calls(self) -> Calls:
        """Calls of the loaded model that a profiler can time."""
        return {
            "text": [(self._text, "encode")],
            "transformer": self._passes,
            "decode": [(self._text, "decode")],
        }

    def load(self, device: torch.device | str) -> None:
        """Build and fill this process's share of the network, in float32 on a CPU and in bf16 on a GPU.

        Raises:
            WeightsError: a checkpoint is missing, unreadable or does not fit.
            ProcessLost: another process ended.
        """
        locate_all(list(self.list_sources().values()))
        self.check_files()
        use_device(device)
        whole, processes = self.shape, self.processes
        dtype = self.compute_dtype(device)
        transformer = build_on_meta(lambda: TextDecoder(split_config(whole, processes.count), processes.add))

        def take_share(state: Mapping[str, Tensor]) -> State:
            return split_state(state, whole, processes.rank, processes.count)

        def place(_: str, tensor: Tensor) -> Tensor:
            return tensor.to(device).to(dtype)  # cast on the device, so that 16-bit files are sent in 16 bits

        if self.weights == "random":
            filled = build_on_meta(lambda: TextDecoder(whole))
            self.weights_sha256 = fill_random(filled, lambda _, tensor: tensor.to(dtype))
            transformer.load_state_dict(take_share(filled.state_dict()), assign=True)
        else:
            # The digest includes the tokenizer, which is in the same folder.
            self.weights_sha256 = load_into(
                transformer, self.sources["weights"], lambda raw: take_share(clean_decoder(raw, whole)), place
            )
        self.open_tokenizer()  # its files may be missing
        self._transformer = transformer.to(device, dtype)
        self._transformer.prepare_for(device)
        self._device = device
        release_unused(device)

    def list_sources(self) -> Mapping[str, Source]:
        """Return the source of the weights; empty for random weights."""
        return self.sources if self.weights == "files" else {}

    def prepare(self) -> None:
        """Download, convert and copy to the node's disk the files that `load` reads."""
        for source in self.list_sources().values():
            prepare(source, partial(clean_decoder, shape=self.shape))

    def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> list[Text]:
        """Generate the texts of a batch of prompts."""
        drawn = self._draw(*lay_out(prompts, self._text, self.prompt_tokens), cache, noise)
        texts = zip(drawn.rows(), drawn.running.tolist(), strict=True)
        return [Text(self._text.decode(row), len(row), not running) for row, running in texts]

    def _draw(self, rows: Tensor, padding: Sequence[int], cache: Cache, noise: Noise) -> DrawnTexts:
        with torch.inference_mode():
            head = TextHead(self.sampling, self._text.ends if self.stop else (), self._text.pad)
            prompts = self._transformer.embed(rows.to(self._device))
            given = (self._transformer, prompts, self.spec.segments, cache, noise, head)
            return draw_tokens(*given, padding=padding, activations=self.activation_bytes(len(rows)))

    def count_prompt_tokens(self, prompts: Sequence[str]) -> list[int]:
        """Return the token count of each prompt without padding; empty if padding counts in the budget."""
        if self.count_padding:
            return []
        tokenizer = self.open_tokenizer()
        return [len(tokenizer.encode(prompt)) for prompt in prompts]

    def open_tokenizer(self) -> TextTokenizer:
        """Return the tokenizer, before weights are loaded."""
        return self._text

    def read_states(
        self, rows: Tensor, segments: Sequence[Segment], cache: Cache, padding: Sequence[int], first: int
    ) -> Tensor:
        """Run the model over tokens int64 [texts, tokens]; return hidden states from position `first` on."""
        rows = rows.to(self._device)

        def embed(start: int, end: int) -> Tensor:
            return self._transformer.embed(rows[:, start:end])

        return read_tokens(self._transformer, embed, rows.shape[1], segments, cache, padding, first)

    def read_own(
        self, prompts: Sequence[str], cache: Cache, noise: Noise, tokens: Sequence[Tensor] | None
    ) -> list[ForcedPass]:
        """Run the model over texts, which are sampled if `tokens` is None; states are [tokens, width]."""
        rows, padding = lay_out(prompts, self._text, self.prompt_tokens)
        if tokens is None:
            tokens = [torch.tensor(row) for row in self._draw(rows, padding, cache, noise).rows()]
        texts = pad_sequence(list(tokens), batch_first=True, padding_value=self._text.pad)
        rows, first = torch.cat((rows, texts[:, :-1]), 1), self.prompt_tokens - 1
        states = self.read_states(rows, self.spec.segments, cache, padding, first)
        return [ForcedPass(row, state[: len(row)]) for row, state in zip(tokens, states, strict=True)]

    def find_logits(self, states: Tensor, first: int) -> Tensor:
        """Return logits float32 [n, vocabulary] of hidden states [n, width]."""
        return self._transformer.logits(states)

    def token_strings(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """Return the characters of each token."""
        return self._text.token_strings(tokens)

    @cached_property
    def _text(self) -> TextTokenizer:
        """The tokenizer, which takes a second to read from some files: checks of prompts and generation share it."""
        if self.weights == "random":
            return HashedTextTokenizer(self.shape.vocabulary)
        source = self.sources["weights"]
        tokenizer = self._open_tokenizer(source)
        if (found := max(*tokenizer.ends, tokenizer.pad, tokenizer.begin or 0)) >= self.shape.vocabulary:
            raise WeightsError(
                f"{source.key}: eos_token_id, bos_token_id or pad_token_id of the model's files is {found}, not below "
                f"vocab_size={self.shape.vocabulary}; correct the files, or give the model's own tokenizer"
            )
        return tokenizer

    def _read_text(self, device: torch.device | str) -> tuple[TextTokenizer, str]:
        return self._text, ""

    @abstractmethod
    def _open_tokenizer(self, source: Source) -> TextTokenizer:
        """Return the tokenizer in a source's files."""
