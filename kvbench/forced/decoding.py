"""Forced decoding: a model is given tokens, and its predictions are compared with the full cache's."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvbench.core.config import ConfigError
from kvbench.core.files import check_file
from kvbench.core.segments import ModelSpec
from kvbench.forced.compare import compare_states, pack_bits
from kvbench.forced.passes import ForcedPass, OwnReadable
from kvbench.forced.record import KIND, STATES, ScoredText
from kvbench.models.base import Cache, Model
from kvbench.models.noise import Noise
from kvbench.models.outputs import Outputs

C = TypeVar("C", bound=type)
M = TypeVar("M", bound=OwnReadable)


def delegate(*names: str) -> Callable[[C], C]:
    """Return a class decorator that takes these attributes and methods from an instance's `inner` model."""

    def decorate(cls: C) -> C:
        for name in names:
            setattr(cls, name, property(attrgetter(f"inner.{name}")))
        return cls

    return decorate


@delegate(
    "weights_sha256", "list_sources", "prepare", "check_files", "parameters", "calls", "least_work",
    "activation_bytes", "compute_dtype", "key_rotation", "output_projection", "identified",
)  # fmt: skip
class ForcedDecoding(Model, Generic[M]):
    """Base class of models that are given tokens instead of sampling them.

    Attributes:
        inner: the model with the weights.
    """

    output: ClassVar[str] = KIND

    def __init__(self, model: M) -> None:
        if model.processes.count > 1:
            raise ConfigError(
                "model.tensor_parallel: forced decoding runs in one process; set model.tensor_parallel=1"
            )
        self.inner, self.name, self.processes = model, model.name, model.processes

    def load(self, device: str) -> None:
        """Load the model."""
        self.inner.load(device)

    @abstractmethod
    def read(
        self, prompts: Sequence[str], cache: Cache, noise: Noise, tokens: Sequence[Tensor] | None
    ) -> list[ForcedPass]:
        """Run the model over the given tokens of a batch.

        Args:
            prompts: prompts of the batch.
            cache: cache of keys and values.
            noise: randomness per prompt, if the tokens are sampled first.
            tokens: tokens of the full cache's pass, int64 [n] each; None for that pass itself.
        """

    def score(
        self, prompts: Sequence[str], cache: Cache, noise: Noise, full: Sequence[Path] | None
    ) -> list[ScoredText]:
        """Run the model over a batch and compare its predictions with the full cache's.

        Args:
            prompts: prompts of the batch.
            cache: cache of keys and values, under the run's method.
            noise: randomness per prompt.
            full: files of the full cache's records; None for its own pass.

        Raises:
            ConfigError: a file of `full` is damaged, or belongs to another text.
        """
        if full is None:
            return [self.compare(passed, None) for passed in self.read(prompts, cache, noise, None)]
        stored = [_read_full(path) for path in full]
        batch = self.read(prompts, cache, noise, [tokens.long() for tokens, _ in stored])
        for path, passed, (_, states) in zip(full, batch, stored, strict=True):
            if passed.states.shape != states.shape:
                raise ConfigError(f"{path}: belongs to another text; delete it and run again")
        return [self.compare(passed, states) for passed, (_, states) in zip(batch, stored, strict=True)]

    def compare(self, passed: ForcedPass, full: Tensor | None) -> ScoredText:
        """Compare predictions with the full cache's.

        Args:
            passed: the pass under a method, or under the full cache.
            full: the full cache's hidden states, shaped like `passed.states`; None if `passed` is its pass.
        """
        states = passed.states
        tokens = passed.tokens.to(states.device)
        other = states if full is None else full.to(states)
        columns = compare_states(states, other, tokens, self.inner.find_logits)
        ids = (tokens.int() if tokens.ndim == 1 else pack_bits(tokens)).cpu().numpy()
        occurring = np.unique([ids, columns["likeliest"], columns["likeliest_full"]]).tolist()
        lengths, line = self.spec.lengths, self.spec.line
        rows = (line,) * (len(ids) // line) if line else ()
        return ScoredText(
            ids,
            **columns,
            words=dict(
                zip(occurring, self.inner.token_strings(occurring), strict=False)
            ),  # nothing for an image
            groups=lengths if self.spec.family == "next-scale" else rows,
            states=states.cpu() if full is None else None,
        )


@delegate("revision", "ignored_settings", "check_prompts", "count_prompt_tokens")
class ForcedOutputs(ForcedDecoding[OwnReadable]):
    """Forced decoding of a model's own outputs, which the full cache's run generates.

    Raises:
        ConfigError: the model does not support it.
    """

    def __init__(self, model: Model) -> None:
        if not isinstance(model, OwnReadable):
            raise ConfigError(f"prompts=own: {model.name} does not support it; choose other prompts")
        super().__init__(model)

    @property
    def spec(self) -> ModelSpec:
        """Shapes and schedule of the inner model."""
        return self.inner.spec

    def resolve_settings(self, device: torch.device | str) -> Mapping[str, object]:
        """Return the settings of the model, as the identity of a run has them."""
        return {**self.inner.resolve_settings(device), "reading": {"own": True}}

    def read(
        self, prompts: Sequence[str], cache: Cache, noise: Noise, tokens: Sequence[Tensor] | None
    ) -> list[ForcedPass]:
        """Run the model over a batch of its outputs, which are generated first if `tokens` is None."""
        return self.inner.read_own(prompts, cache, noise, tokens)

    def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> Outputs:
        """Return the generated outputs of a batch, for a calibration."""
        return self.inner.generate(prompts, cache, noise)


def _read_full(path: Path) -> tuple[Tensor, Tensor]:
    """Return the tokens and the hidden states of the full cache's record."""
    try:
        with safe_open(check_file(path), framework="pt") as file:
            return file.get_tensor("tokens"), file.get_tensor(STATES)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path}: not a record of the full cache ({error}); delete it and run again"
        ) from None
