"""Base class of models, the interface of their cache, and checks of prompts and logits."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from kvbench.core.config import UserError
from kvbench.core.processes import ALONE, Processes
from kvbench.core.segments import ModelSpec, Segment
from kvbench.engine.recording.graphs import Repeat
from kvbench.engine.recording.repetitions import Repetitions
from kvbench.models.files.weights import Source
from kvbench.models.noise import Noise
from kvbench.models.outputs import Outputs

Calls = Mapping[str, Sequence[tuple[object, str]]]
"""Methods of a loaded model's parts by phase (`text`, `transformer`, `decode`): pairs of object and method name."""
MAX_SIZE = 2**24
"""Maximum of each size in a model's shape, above any published vocabulary, width or text length."""


class NotFinite(UserError, FloatingPointError):
    """Logits or hidden states are not finite; the message names prompt and segment."""


def require_finite(values: Tensor, segment: int) -> None:
    """Check that the logits or hidden states [prompts, ...] of a segment are finite.

    Raises:
        NotFinite: a value is not finite.
    """
    finite = torch.isfinite(values)
    if not finite.all():
        prompt = finite.flatten(1).all(1).tolist().index(False)
        raise NotFinite(f"logits or states are not finite: prompt {prompt} of the batch, segment {segment}")


class FiniteCheck:
    """Check that the logits of all scales are finite; a GPU's are checked at the end, so that the host waits once."""

    def __init__(self) -> None:
        self._maxima: list[Tensor] = []

    def note(self, logits: Tensor, scale: int) -> None:
        """Check the logits [prompts, ...] of the next scale: at once on a CPU, in `conclude` on a GPU.

        Raises:
            NotFinite: a logit is not finite.
        """
        if logits.is_cuda:
            self._maxima.append(logits.abs().flatten(1).amax(1, keepdim=True))  # NaN if a logit is
        else:
            require_finite(logits, scale)

    def conclude(self) -> None:
        """Check the logits noted on a GPU.

        Raises:
            NotFinite: a logit is not finite.
        """
        if self._maxima:
            for scale, maximum in enumerate(torch.stack(self._maxima).cpu()):
                require_finite(maximum, scale)


def require_sizes(key: str, config: object, *names: str) -> None:
    """Check that the fields `names` of `config`, the settings under `key`, are from 1 to `MAX_SIZE`.

    Raises:
        ValueError: a size is outside the range; the message names the first one.
    """
    for name in names:
        if (size := getattr(config, name)) < 1:
            raise ValueError(f"{key}.{name}={size}: must be at least 1")
        if size > MAX_SIZE:
            raise ValueError(f"{key}.{name}={size}: must be at most {MAX_SIZE}")


def refuse(key: str, config: object, **rules: tuple[bool, str]) -> None:
    """Check settings of `config`; `rules` gives, by name, whether a setting is wrong, and the words after "must".

    Raises:
        ValueError: a setting is wrong; the message names the first one under `key`.
    """
    for name, (wrong, rule) in rules.items():
        if wrong:
            raise ValueError(f"{key}.{name}={getattr(config, name)}: must {rule}")


def read_labels(prompts: Sequence[str], classes: int, model: str) -> list[int]:
    """Return the class number that begins each prompt; -1 (no class) becomes `classes`.

    Later words, such as the class's name, are ignored. `model` is the model's name for the message.

    Raises:
        ValueError: a prompt names no class; the message shows the first one.
    """
    labels = []
    for prompt in prompts:
        match = re.match(r"\s*(-1|[0-9]{1,9})(?:\s|$)", prompt)
        if match is None or int(match[1]) >= classes:
            raise ValueError(
                f"prompt {prompt!r}: {model} needs a class number from 0 to {classes - 1} (-1 for none) as the first "
                "word, as prompts=imagenet with prompts.classes gives, or prompts=scene_classes for var_tiny"
            )
        labels.append(classes if int(match[1]) < 0 else int(match[1]))
    return labels


@dataclass(frozen=True)
class TextFeatures:
    """Encoded prompts of unequal length, packed.

    Attributes:
        values: float32 [sum of lengths, channels].
        lengths: words of each prompt; a word is a token of the text encoder.
    """

    values: Tensor
    lengths: tuple[int, ...]

    def pad(self, words: int, *, front: bool = False) -> tuple[Tensor, Tensor]:
        """Return values [prompts, words, channels] padded with zeros, and a mask of words, bool [prompts, words].

        Padding follows the words, or precedes them with `front`.
        """
        values = self.values.new_zeros(len(self.lengths), words, self.values.shape[1])
        lengths = torch.tensor(self.lengths, device=self.values.device).unsqueeze(1)
        positions = torch.arange(words, device=self.values.device)
        mask = positions >= words - lengths if front else positions < lengths
        values[mask] = self.values
        return values, mask


class LeastWork(NamedTuple):
    """Minimum work of a generation except attention, for any implementation of the model.

    Attributes:
        layers: parameters of the matrix products of every token.
        head: parameters of the matrix products of only those tokens from whose logits a token is sampled.
        decoder: parameters of an image's decoder.
        decoding: floating-point operations of decoding an image.
        arithmetic: arithmetic of the decoder on a GPU: a dtype or `tf32`.
    """

    layers: int = 0
    head: int = 0
    decoder: int = 0
    decoding: int = 0
    arithmetic: str = "float32"


class Cache(Protocol):
    """Interface of a cache for models; implemented by `kvbench.engine.cache.KVCache`.

    Attributes:
        repetitions: recordings of steps or of whole segments, kept between generations; None if nothing is recorded.
    """

    repetitions: Repetitions | None

    def reset(self, sequences: int, padding: Sequence[int] | None = None) -> None:
        """Start a generation of `sequences` sequences.

        `padding` is the number of padding tokens in front of each; None if all prompts are equally long. A padded
        prompt is attended to in one step.
        """
        ...

    def begin(self, segment: Segment) -> None:
        """Begin the segment that the next tokens belong to."""
        ...

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_queries: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """Attend from q to cached and current keys and values; tensors and result are [sequences, heads, tokens, D].

        `raw_queries` computes the projected queries (before bias, norm, scale, rotation) for methods that need them.
        """
        ...

    def release(self) -> None:
        """Free the storage of keys and values after the last token."""
        ...

    def open_steps(self) -> Repeat | None:
        """Return a function that runs the segment's one-token steps by one recording; None if nothing is recorded."""
        ...


@dataclass(kw_only=True, eq=False)
class ModelDefaults:
    """Defaults of other configuration groups, set in a model's file; a run's identity does not contain them.

    Attributes:
        default_leading: first tokens of a text that methods keep if the configuration names no `protect.leading`.
        default_prompts: prompt set if the command, a sweep or a preset names none; None: that of `conf/config.yaml`.
        default_windows: windows of methods if none are named, `image` or `text`.
        default_base: method around which `method=pricekv` is built; None: `forecast`, which is for images.
        default_eval: metrics if none are named, one file of `conf/eval` or several.
        default_file_eval: metrics for `prompts=file` if none are named; None: `default_eval`.
    """

    default_leading: int = 0
    default_prompts: str | None = None
    default_windows: str | None = None
    default_base: str | None = None
    default_eval: str | Sequence[str] | None = None
    default_file_eval: str | Sequence[str] | None = None


class Model(ModelDefaults, ABC):
    """Base class of models: shapes without weights, then outputs for prompts.

    A subclass implements `spec`, `load` and `generate`. The other members have defaults.

    Attributes:
        name: name as in `conf/model`.
        output: kind of its samples, `images` or `texts`.
        half: dtype of its blocks on a GPU, as in the official code's autocast.
        revision: increased when the same settings give different samples, so that old runs are not reused.
        unused: settings that change no sample, which identities leave out.
        ignored_settings: settings of its files that affect its texts and that a run ignores, JSON values by name.
        processes: processes that share the model; set before `load`.
        weights_sha256: hash of the loaded weights, part of a run's identity; empty until `load`.
    """

    name: str
    output: ClassVar[str] = "images"
    half: ClassVar[torch.dtype] = torch.bfloat16
    revision: ClassVar[int] = 0
    unused: ClassVar[tuple[str, ...]] = ()
    ignored_settings: Mapping[str, object] = {}
    processes: Processes = ALONE
    weights_sha256: str = ""

    @property
    @abstractmethod
    def spec(self) -> ModelSpec:
        """Shapes and schedule, without weights."""

    @abstractmethod
    def load(self, device: str) -> None:
        """Read the weights, move them to the device and set `weights_sha256`."""

    @abstractmethod
    def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> Outputs:
        """Return the samples of a batch of prompts: images uint8 [B, H, W, 3] RGB on the CPU, or texts.

        Raises:
            NotFinite: the model produced NaN or infinite logits.
            ValueError: a prompt is not valid for the model.
        """

    def resolve_settings(self, device: torch.device | str) -> Mapping[str, object]:
        """Return settings that a run's identity has resolved, such as those whose meaning depends on the device."""
        return {}

    def list_sources(self) -> Mapping[str, Source]:
        """Return the source of each part's weights; empty for random weights."""
        return {}

    def prepare(self) -> None:
        """Download, convert and copy to the node's disk the files that `load` reads.

        Raises:
            WeightsError: files are missing; the message names all of them.
        """

    def check_files(self) -> None:
        """Check that local files describe the network as the settings do, without a download.

        Raises:
            WeightsError: values differ; the message names the file and the keys.
        """

    @property
    def identified(self) -> "Model":
        """The model whose classes count in a run's identity."""
        return self

    @property
    def parameters(self) -> int:
        """Number of parameters, for plans and profiles, available without weights; 0 if it is unknown."""
        return 0

    @property
    def least_work(self) -> LeastWork:
        """Work of a generation beside attention, for plans; zero if it is unknown."""
        return LeastWork()

    @property
    def calls(self) -> Calls:
        """Calls of the loaded model that a profiler can time."""
        return {}

    def activation_bytes(self, prompts: int) -> int:
        """Return the peak bytes of a generation on a GPU without weights and cache, from shapes alone."""
        return 0

    def decoding_bytes(self, prompts: int) -> int:
        """Return the peak bytes of decoding on a GPU without weights, after the cache is released."""
        return 0

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Check prompts before weights are loaded.

        Raises:
            ValueError: a prompt is not valid for the model; the message shows it.
        """

    def count_prompt_tokens(self, prompts: Sequence[str]) -> list[int]:
        """Return the token count of each prompt without padding; empty without padding, or if it counts in the budget.

        Raises:
            ValueError: a prompt cannot be encoded.
            WeightsError: the tokenizer is missing.
        """
        return []

    def compute_dtype(self, device: torch.device | str) -> torch.dtype:
        """Return the dtype that the blocks compute in: float32 on a CPU, `half` on a GPU."""
        return self.half if torch.device(device).type == "cuda" else torch.float32

    def key_rotation(self) -> Tensor | None:
        """Return the RoPE factors of keys, complex64 [positions, D/2]; None without RoPE.

        A factor rotates two neighbouring channels.
        """
        return None

    def output_projection(self, layer: int) -> Tensor | None:
        """Return W_o of a layer of the loaded model, [width, query heads x D]; None if it is not exposed."""
        return None
