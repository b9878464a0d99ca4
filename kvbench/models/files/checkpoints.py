"""Contents of checkpoints: files of safetensors, GGUF and torch, folders of shards; no code in them is run."""

import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kvbench.core.config import UserError
from kvbench.core.files import check_file, parse_json, read_bytes
from kvbench.models.files.gguf import PackedTensor, read_gguf
from kvbench.models.files.gguf_decoder import list_tensors

State = dict[str, Tensor]
Clean = Callable[[Mapping[str, object]], State]
"""Conversion of a file's contents to a module's state, with exactly the module's names."""
LAYER = re.compile(r"(?:.*\.)?(?:layers|blocks|block_chunks)\.\d+(?:\.module\.\d+)?(?=\.)")
"""Prefix of the names of a transformer layer's parameters in published files."""
GGUF = ".gguf"
"""Suffix of llama.cpp's files."""
WHOLE = "model.safetensors"
"""The single file of a model's folder, or the prefix of its index's name."""


class WeightsError(UserError, RuntimeError):
    """A checkpoint is missing, unreadable or of another model; the message says what to do."""


def read(path: Path) -> Mapping[str, object]:
    """Return the raw contents of a safetensors, GGUF or torch file, or of a folder in the Hugging Face Hub's layout.

    A GGUF file gives `PackedTensor`s, which `split_layers` unpacks. Torch files are read with `weights_only=True`, so
    that code in them does not run.

    Raises:
        WeightsError: the file is truncated, unsafe or of an unknown format.
    """
    try:
        if path.is_dir():
            return _read_shards(path)
        if check_file(path).suffix == ".safetensors":
            return load_file(path)
        if path.suffix == GGUF:
            return list_tensors(read_gguf(path))
        mapped = zipfile.is_zipfile(path)  # older torch files cannot be mapped
        raw = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        if not isinstance(raw, Mapping):
            raise ValueError(f"it contains a {type(raw).__name__}, not tensors by name")
        return dict(raw)
    except WeightsError as error:  # the message names the shard
        raise error from None
    except UnpicklingError:  # torch's message recommends unsafe loading
        raise WeightsError(
            f"{path}: not a readable checkpoint (it is damaged or contains more than tensors)"
        ) from None
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, SafetensorError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise WeightsError(f"{path}: not a readable checkpoint ({reason})") from None


def _read_shards(folder: Path) -> Mapping[str, object]:
    if (folder / WHOLE).is_file():
        return load_file(check_file(folder / WHOLE))
    for name in (f"{WHOLE}.index.json", "pytorch_model.bin.index.json"):
        if (folder / name).is_file():
            return _join_shards(folder, _read_index(folder / name))
    raise ValueError(f"no {WHOLE}, {WHOLE}.index.json or pytorch_model.bin.index.json in the folder")


def _read_index(path: Path) -> dict[str, list[str]]:
    """Return the tensors of each shard, shards in order."""
    index = parse_json(read_bytes(path))
    files = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(files, Mapping) or not all(isinstance(shard, str) for shard in files.values()):
        raise ValueError(f"{path.name} has no weight_map of tensors and their files")
    shards: dict[str, list[str]] = {shard: [] for shard in sorted(set(files.values()))}
    for tensor, shard in files.items():
        shards[shard].append(tensor)
    return shards


def _join_shards(folder: Path, shards: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """Return the contents of shards, each of which must have the tensors that the index lists for it."""
    if outside := [shard for shard in shards if Path(shard).name != shard]:
        raise ValueError(f"the index names a file outside the folder: {outside[0]}")
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise ValueError(f"files of the index are missing: {', '.join(missing)}")
    merged: dict[str, object] = {}
    owners: dict[str, str] = {}
    for shard, tensors in shards.items():
        content = read(folder / shard)
        if lost := [tensor for tensor in tensors if tensor not in content]:
            raise ValueError(
                f"{shard} lacks {len(lost)} tensors of the index, such as {lost[0]}; copy it again"
            )
        if twice := [tensor for tensor in content if tensor in owners]:
            raise ValueError(f"{shard} and {owners[twice[0]]} both hold {twice[0]}")
        owners |= dict.fromkeys(content, shard)
        merged.update(content)
    return merged


def is_safe(path: Path) -> bool:
    """Return whether a file or folder can be read without conversion."""
    return path.suffix in (".safetensors", GGUF) or any(
        (path / name).is_file() for name in (WHOLE, f"{WHOLE}.index.json")
    )


def split_layers(raw: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield the contents of a checkpoint layer by layer, tensors outside layers first; nested mappings stay nested.

    Layers are converted independently, so that only one is in memory; packed tensors are unpacked here.
    """
    for group in _group_layers(raw).values():
        yield {k: v.unpack() if isinstance(v, PackedTensor) else v for k, v in group.items()}


def _group_layers(raw: Mapping[str, object]) -> dict[str, dict[str, object]]:
    groups: dict[str, dict[str, object]] = {"": {}}
    for name, value in raw.items():
        match = LAYER.match(str(name))
        flat: Mapping[str, object] = {match[0] if match else "": value}
        for layer, part in (_group_layers(value) if isinstance(value, Mapping) else flat).items():
            groups.setdefault(layer, {})[name] = part
    return groups
