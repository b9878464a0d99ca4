"""Tensors with JSON metadata in safetensors files: calibrations, statistics, checkpoints and trained weights."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from kvbench.core.files import check_file, parse_json, write_whole


def save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, object]) -> None:
    """Write tensors and JSON metadata to `path` (.safetensors), whole or not at all."""
    contiguous = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    # `save_file` would make a file that only its owner may read; the folder is shared.
    write_whole(path, serialize(contiguous, {"kvbench": json.dumps(metadata, sort_keys=True)}))


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Read a file of `save`: tensors on the CPU and the metadata.

    The tensors are copies: mapped ones would change with the file.

    Raises:
        OSError, SafetensorError, ValueError: the file cannot be read, or has no metadata.
    """
    with safe_open(check_file(path), framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
        return tensors, parse_json((file.metadata() or {}).get("kvbench", ""))


def group(tensors: Mapping[str, Tensor], prefix: str, mark: str = "/") -> dict[str, Tensor]:
    """Return the tensors whose names start with `prefix` and `mark`, without that start."""
    start = prefix + mark
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
