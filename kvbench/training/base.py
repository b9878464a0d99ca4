"""Base class of the trainings of `task=train`, and the weight files that ship."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.core.config import ConfigError
from kvbench.core.devices import keep_freed_memory
from kvbench.models.base import Model
from kvbench.training import checkpoint
from kvbench.training.loop import Recipe

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Training(ABC):
    """Base class of `task=train`; a subclass has a recipe for every network, and `_train`.

    Attributes:
        kind: class of the models that the recipe is for.
        out: folder of checkpoints and of the finished weights; training resumes from what lies there.
        pool: rendered scenes to train on.
        seed: seed of the scenes.
        device: where networks are trained; a CPU and a GPU do not give the same weights.
        threads: torch threads, on a CPU.
        compiled: use torch.compile (needs a C++ compiler).
    """

    kind: ClassVar[type[Model]]
    out: str
    pool: int = 60_000
    seed: int = 0
    device: str = "cpu"
    threads: int = 2
    compiled: bool = True

    def train(self, model: Model) -> Path:
        """Train a model's networks and return the folder with the finished weights.

        Raises:
            ConfigError: the recipe is for another kind of model.
            ValueError, FloatingPointError: see `kvbench.training.loop.fit`.
        """
        out, started = self._prepare(model), time.perf_counter()
        self._train(model, out)
        log.info("trained in %.0f s: %s", time.perf_counter() - started, out)
        return out

    @abstractmethod
    def _train(self, model: Any, out: Path) -> None:
        """Train the networks of a model of `kind` and write their weights."""

    def _prepare(self, model: Model) -> Path:
        """Check the kind of model, set torch's threads and return the folder, which exists from then on.

        Raises:
            ConfigError: the recipe is for another kind of model.
        """
        if not isinstance(model, self.kind):
            raise ConfigError(
                f"train: the recipe is for a {self.kind.__name__}; take train={model.name} for model={model.name}"
            )
        torch.set_num_threads(self.threads)
        keep_freed_memory()
        out = Path(self.out).expanduser()
        out.mkdir(parents=True, exist_ok=True)
        return out


def write_weights(path: Path, weights: Mapping[str, Tensor], recipe: Recipe, part: str = "") -> None:
    """Write weights as float16 safetensors with their recipe, all of them or those of a part under their own names.

    Args:
        path: the file.
        weights: by name.
        recipe: what they were trained with.
        part: attribute of the trained module whose weights are written; empty for all.
    """
    chosen = checkpoint.group(weights, part, ".") if part else weights
    half = {name: tensor.cpu().half() for name, tensor in chosen.items()}
    checkpoint.save(path, half, {"recipe": asdict(recipe)})
