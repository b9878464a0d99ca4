"""Values that every model's parts exchange."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from kvbench.core.config import UserError
from kvbench.core.graphs import Record, Repetitions
from kvbench.core.segments import ModelSpec, Segment
from kvbench.models.noise import Noise
from kvbench.models.outputs import Outputs

Calls = Mapping[str, Sequence[tuple[object, str]]]
"""Parts of a loaded model by phase (`text`, `transformer`, `decode`): objects and the names of their methods."""


class NotFinite(UserError, FloatingPointError):
    """Logits with NaN or infinity; the message names prompt and scale."""


def compute_dtype(model: object, device: torch.device | str) -> torch.dtype:
    """Return the dtype that a model's blocks compute in, in which keys and values are stored unless told otherwise.

    That is float32 on a CPU. On a GPU it is the model's attribute `half`, what its official program takes under
    autocast; bfloat16 for a model without one.
    """
    if torch.device(device).type != "cuda":
        return torch.float32
    half = getattr(model, "half", torch.bfloat16)
    assert isinstance(half, torch.dtype)
    return half


def find_rotation(model: object) -> Tensor | None:
    """Return what a model's keys are turned by at each position, complex64 [positions, D/2]; None if it does not tell.

    Neighbouring channels turn together.
    """
    tell = getattr(model, "key_rotation", None)
    rotation = None if tell is None else tell()
    assert rotation is None or isinstance(rotation, Tensor)
    return rotation


def require_finite(logits: Tensor, scale: int) -> None:
    """Check that the logits [prompts, ...] of a scale are finite.

    Raises:
        NotFinite: some are not finite.
    """
    if not torch.isfinite(logits).all():
        _refuse(int((~torch.isfinite(logits)).flatten(1).any(1).nonzero()[0]), scale)


class FiniteCheck:
    """Checks that the logits of all scales are finite; a GPU is asked once, so that nobody waits in between."""

    def __init__(self) -> None:
        self._finite: list[Tensor] = []

    def note(self, logits: Tensor, scale: int) -> None:
        """Check the logits [prompts, ...] of the next scale: on a CPU now, else with all the others.

        Raises:
            NotFinite: some are not finite.
        """
        if logits.is_cuda:
            self._finite.append(torch.isfinite(logits).flatten(1).all(1))
        else:
            require_finite(logits, scale)

    def conclude(self) -> None:
        """Wait for what a GPU has noted.

        Raises:
            NotFinite: some were not finite.
        """
        if not self._finite:
            return
        for scale, prompts in enumerate(torch.stack(self._finite).cpu().tolist()):
            if not all(prompts):
                _refuse(prompts.index(False), scale)


def _refuse(prompt: int, scale: int) -> NoReturn:
    raise NotFinite(f"logits are not finite: prompt {prompt} of the batch, scale {scale}")


def require_positive(key: str, **sizes: int) -> None:
    """Check that sizes are at least 1; `key` is the config key that they stand under.

    Raises:
        ValueError: naming the first one that is not.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{key}.{name}={size}: must be at least 1")


def read_labels(prompts: Sequence[str], classes: int, model: str) -> list[int]:
    """Return the class that the first word of each prompt names; -1, no class, is `classes`.

    Words after it (the class's name) are for people.

    Args:
        prompts: one an image.
        classes: classes there are.
        model: name of the model, for the message.

    Raises:
        ValueError: naming the first prompt that names no class.
    """
    return [_read_label(prompt, classes, model) for prompt in prompts]


def _read_label(prompt: str, classes: int, model: str) -> int:
    found = re.match(r"\s*(-1|[0-9]{1,9})(?:\s|$)", prompt)
    if found is None or int(found[1]) >= classes:
        raise ValueError(
            f"prompt {prompt!r}: {model} wants a class number from 0 to {classes - 1} (-1 for none) "
            "as the first word, as prompts=imagenet with prompts.classes gives, or prompts=scene_classes for var_tiny"
        )
    return classes if int(found[1]) < 0 else int(found[1])


@dataclass(frozen=True)
class TextFeatures:
    """Encoded prompts of unequal length, packed.

    Attributes:
        values: float32 [sum of lengths, channels].
        lengths: words (tokens of the text encoder) of each prompt.
    """

    values: Tensor
    lengths: tuple[int, ...]

    def pad(self, words: int, *, front: bool = False) -> tuple[Tensor, Tensor]:
        """Return values [prompts, words, channels], zero beyond a prompt, and which exist, bool [prompts, words].

        Zeros follow a prompt, or come before it with `front`.
        """
        values = self.values.new_zeros(len(self.lengths), words, self.values.shape[1])
        lengths = torch.tensor(self.lengths, device=self.values.device).unsqueeze(1)
        place = torch.arange(words, device=self.values.device)
        mask = place >= words - lengths if front else place < lengths
        values[mask] = self.values
        return values, mask


class Cache(Protocol):
    """What a model needs of a cache (`kvbench.engine.cache.KVCache`).

    Attributes:
        record: records the steps of a segment, so that they can be repeated; None where each is to run by itself.
        repetitions: keeps records of whole segments, from generation to generation; None where none can be repeated.
    """

    record: Record | None
    repetitions: Repetitions | None

    def reset(self, sequences: int, padding: Sequence[int] | None = None) -> None:
        """Start a generation of `sequences` sequences; `padding` counts the tokens in front of each that do not exist.

        Padded prompts come in one step. None where all prompts are equally long.
        """
        ...

    def begin(self, segment: Segment) -> None:
        """Announce the segment whose tokens come next."""
        ...

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, plain: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """Attend from q to the layer's cached past and the current k, v; all [sequences, heads, tokens, D].

        `plain` computes the queries as projected (before bias, norm, scale, rotation), for methods that score by them.
        """
        ...

    def release(self) -> None:
        """Give back the storage of keys and values, once no token is left to attend to them."""
        ...

    def advance(self) -> None:
        """Count a token of the segment whose step was recorded and repeated, so that `attend` was not called."""
        ...


class Model(Protocol):
    """What a run needs of a model.

    One that makes something else than images says what, by a class attribute `output` (`texts`). One with a method
    `output_projection(layer)` tells W_o of its layers, [width, query heads x D], to methods that are calibrated. One
    with a method `key_rotation()` tells what neighbouring channels of its keys are multiplied by at every position,
    complex64 [positions, D/2], to storage in few bits.

    Attributes:
        name: as in `conf/model`.
        weights_sha256: of what was loaded, part of what a run is named by; empty until then.
    """

    name: str
    weights_sha256: str

    @property
    def spec(self) -> ModelSpec:
        """Shapes and schedule, without weights."""
        ...

    @property
    def parameters(self) -> int:
        """Parameters of transformer and tokenizer, without weights."""
        ...

    @property
    def calls(self) -> Calls:
        """Calls that a profiler may watch, once the model is loaded."""
        ...

    def activation_bytes(self, prompts: int) -> int:
        """Return the most bytes that drawing holds on a GPU beside weights and cache, by shapes alone."""
        ...

    def decoding_bytes(self, prompts: int) -> int:
        """Return the most bytes that decoding holds there beside weights, when the cache is given back."""
        ...

    def load(self, device: str) -> None:
        """Read the weights and move them to the device."""
        ...

    def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> Outputs:
        """Return what is made of the prompts: images uint8 [B, H, W, 3] RGB on the CPU, or texts."""
        ...
