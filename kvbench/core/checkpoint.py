"""Tensors with JSON metadata as safetensors files: calibrations, statistics, checkpoints and weights of trainings."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from kvbench.core.files import parse_json, write_whole


def save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, object]) -> None:
    """Write tensors and JSON metadata to `path` (.safetensors), whole or not at all."""
    contiguous = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    # `save_file` would make a file that only its owner may read, and others share the folder.
    write_whole(path, serialize(contiguous, {"kvbench": json.dumps(metadata, sort_keys=True)}))


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Read what `save` wrote: tensors on the CPU and the metadata.

    Raises:
        OSError, SafetensorError, ValueError: the file cannot be read, or has no metadata.
    """
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        return tensors, parse_json((file.metadata() or {}).get("kvbench", ""))


def group(tensors: Mapping[str, Tensor], prefix: str, mark: str = "/") -> dict[str, Tensor]:
    """Return the tensors whose name starts with `prefix` and a mark, under the rest of their name."""
    start = prefix + mark
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
