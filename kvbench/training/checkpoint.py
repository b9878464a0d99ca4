"""Training checkpoints: safetensors written beside and renamed, so that a killed run leaves the last whole one."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, object]) -> None:
    """Writes tensors and JSON metadata to `path` (.safetensors), whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    contiguous = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    save_file(contiguous, beside, metadata={"kvbench": json.dumps(metadata, sort_keys=True)})
    with beside.open("rb") as file:
        os.fsync(file.fileno())
    beside.replace(path)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Reads what `save` wrote: tensors on the CPU and the metadata."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        return tensors, json.loads(file.metadata()["kvbench"])


def group(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Tensors whose name starts with `prefix` and a slash, without it."""
    return {
        name[len(prefix) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(prefix + "/")
    }
