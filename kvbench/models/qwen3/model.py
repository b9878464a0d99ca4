"""Qwen3: settings and shapes without weights, then prompts to texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.devices import release_unused, use_device
from kvbench.core.segments import ModelSpec, next_token_image
from kvbench.models.base import Cache, Calls, require_positive
from kvbench.models.files.checkpoints import State
from kvbench.models.files.parameters import build_on_meta, fill_random, load_into
from kvbench.models.files.weights import Source, check_sources, locate_all, prepare
from kvbench.models.next_token import NextTokenModel
from kvbench.models.noise import Noise
from kvbench.models.outputs import Text
from kvbench.models.parts.config_file import Expected, check_config, expect_decoder
from kvbench.models.parts.tensor_parallel import check_split, split_config, split_state
from kvbench.models.parts.tokens import lay_out
from kvbench.models.qwen3.files import clean_qwen3
from kvbench.models.qwen3.loop import draw_text_tokens
from kvbench.models.qwen3.prompt import HashedTextTokenizer, TextTokenizer, read_tokenizer
from kvbench.models.qwen3.sampling import TextSampling
from kvbench.models.qwen3.transformer import Qwen3, Qwen3Config


@dataclass
class Qwen3Model(NextTokenModel[Qwen3]):
    """Qwen3 at any size: settings now, weights on `load`.

    Prompts are padded in front to `prompt_tokens` tokens. Positions count from the first padding token, because
    attention depends on their differences alone.

    The length of a text is not known in advance, so a fractional budget refers to the longest sequence:
    `prompt_tokens` and `max_tokens` (without the last chunk, which is never cached). Papers give tokens per head,
    `budget=1024`, which do not depend on `max_tokens`.

    Differs from transformers' program in: rotation is in float32, where transformers rounds cosines and sines to the
    weights' dtype.

    With several processes, each has a share of every layer's heads and hidden channels. All write the same texts, which
    equal one process's texts up to rounding, because sums have another order.

    Attributes:
        name: as in `conf/model`.
        transformer: shape of the language model.
        sampling: temperature and truncation.
        sources: source of `weights`, the model's folder with its tokenizer.
        weights: `files`, or `random` numbers in the model's shape (a hash in place of the tokenizer), for timing and
            tests.
        prompt_tokens: tokens of the longest prompt, with its chat template.
        max_tokens: maximum tokens of a text.
        chunk: number of tokens between two decisions of a method.
        thinking: whether the model thinks before it answers, with `chat`.
        chat: whether prompts are put into the chat template; otherwise the model continues them.
        stop: whether the model can end a text; otherwise every text has `max_tokens` tokens, for timing.
        default_sinks: sink segments when the config names none; the prompt is the first segment.
        count_padding: whether the padding of a short prompt counts in its budget.
        tensor_parallel: number of processes that share the model.
        processes: these processes, set before `load`.
    """

    name: str
    transformer: Qwen3Config
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

    def __post_init__(self) -> None:
        require_positive("model", prompt_tokens=self.prompt_tokens, chunk=self.chunk)
        if self.max_tokens < 2:
            raise ValueError(f"model.max_tokens={self.max_tokens}: must be at least 2")
        check_split(self.transformer, self.tensor_parallel)
        check_sources(self.weights, self.sources, "weights")

    @cached_property
    def spec(self) -> ModelSpec:
        """Shapes and the schedule of the longest text; generation stops when all texts of a batch have ended."""
        segments = next_token_image(self.prompt_tokens, self.max_tokens, self.chunk)
        spec = self.transformer.describe(self.name, segments, 1)
        return replace(spec, padding_counts=self.count_padding)

    @property
    def revision(self) -> int:  # type: ignore[override]  # depends on the settings
        """1 where top-k or top-p cut ties in an arbitrary order before, 0 for other settings."""
        sampling = self.sampling
        return int(sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1))

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, counted on the meta device."""
        return sum(p.numel() for p in build_on_meta(lambda: Qwen3(self.transformer)).parameters())

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
        whole, own = self.transformer, self.processes
        dtype = self.compute_dtype(device)
        transformer = build_on_meta(lambda: Qwen3(split_config(whole, own.count), own.add))

        def take_share(state: Mapping[str, Tensor]) -> State:
            return split_state(state, whole, own.rank, own.count)

        def place(_: str, tensor: Tensor) -> Tensor:
            return tensor.to(device).to(dtype)  # cast on the device, so that 16-bit files are sent in 16 bits

        if self.weights == "random":
            filled = build_on_meta(lambda: Qwen3(whole))
            self.weights_sha256 = fill_random(filled, lambda _, tensor: tensor.to(dtype))
            transformer.load_state_dict(take_share(filled.state_dict()), assign=True)
        else:
            # The digest includes the tokenizer, which is in the same folder.
            self.weights_sha256 = load_into(
                transformer, self.sources["weights"], lambda raw: take_share(clean_qwen3(raw, whole)), place
            )
        self._text, _ = self._read_text(device)
        self._transformer = transformer.to(device, dtype)
        self._transformer.prepare_for(device)
        self._device = device
        release_unused(device)

    def list_sources(self) -> Mapping[str, Source]:
        """Return the source of the weights; empty for random weights."""
        return self.sources if self.weights == "files" else {}

    def check_files(self) -> None:
        """Compare the folder's `config.json`, if it has one, with the settings.

        Raises:
            WeightsError: naming the file and the keys that differ.
        """
        tied = Expected(self.transformer.tied, "model.transformer.tied")
        for source in self.list_sources().values():
            check_config(source, {**expect_decoder(self.transformer), "tie_word_embeddings": tied})

    def prepare(self) -> None:
        """Download, convert and copy to the node's disk the files that `load` reads.

        Raises:
            WeightsError: naming all missing files.
        """
        for source in self.list_sources().values():
            prepare(source, partial(clean_qwen3, config=self.transformer))

    def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> list[Text]:
        """Return the texts of a batch.

        Raises:
            NotFinite: the model produced NaN or infinite logits.
            ValueError: a prompt has more than `prompt_tokens` tokens.
        """
        rows, padding = lay_out(prompts, self._text, self.prompt_tokens)
        with torch.inference_mode():
            drawn = draw_text_tokens(
                self._transformer,
                self._transformer.embed(rows.to(self._device)),
                self.spec.segments,
                cache,
                noise,
                self.sampling,
                ends=self._text.ends if self.stop else (),
                pad=self._text.pad,
                padding=padding,
                activations=self.activation_bytes(len(prompts)),
            )
        texts = zip(drawn.rows(), drawn.ended.tolist(), strict=True)
        return [Text(self._text.decode(row), len(row), ended) for row, ended in texts]

    def _read_text(self, device: torch.device | str) -> tuple[TextTokenizer, str]:
        if self.weights == "random":
            return HashedTextTokenizer(self.transformer.vocabulary), ""
        return read_tokenizer(self.sources["weights"], thinking=self.thinking, chat=self.chat), ""
