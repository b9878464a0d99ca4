"""What tests of the model share: the official program's tensors, and its way of drawing noise."""

import json
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.places import GOLDENS

GOLDEN = GOLDENS / "infinity"


@lru_cache
def packed(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of a reference file (`tests/golden/infinity/README.md`)."""
    tensors, meta = {}, {}
    for key, planes in np.load(GOLDEN / f"{name}.npz").items():
        if key == "meta":
            meta = json.loads(planes.tobytes())
            continue
        tensor, dtype, shape = key.split("|")
        sizes = [int(size) for size in shape.split(",") if size]
        tensors[tensor] = torch.from_numpy(np.ascontiguousarray(planes.T).view(dtype).reshape(sizes))
    return tensors, meta


class OneStream:
    """All prompts draw from one `generator`, as official programs do."""

    def __init__(self, seed: int, prompts: int) -> None:
        self.generator, self._prompts = torch.Generator().manual_seed(seed), prompts

    def draw(self, count: int) -> Tensor:
        drawn = torch.empty(self._prompts * count).exponential_(generator=self.generator)
        return drawn.view(self._prompts, count)


def note_results(patch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[Tensor]:
    """Fills, while the patch lasts, with what a module's function returns."""
    results: list[Tensor] = []
    inner = getattr(module, name)

    def noted(*arguments: object) -> Tensor:
        results.append(inner(*arguments))
        return results[-1]

    patch.setattr(module, name, noted)
    return results
