"""Weights on disk: cached digests, converted files, and copies on a node's disk.

Digests and converted files are in `$KVBENCH_WEIGHTS` (~/.cache/kvbench/weights by default), copies in `$KVBENCH_STAGE`.
"""

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvbench.core.claims import claim
from kvbench.core.config import ConfigError
from kvbench.core.files import check_file, hash_files, hash_values, read_text, write_beside, write_whole
from kvbench.models.files.checkpoints import WHOLE

log = logging.getLogger(__name__)

MIN_CACHED_BYTES = 1 << 26
"""Size from which a digest is cached; smaller files are hashed in a tenth of a second."""
SETTLING_TIME = 2.0
"""Seconds after a change until another change is certain to have a later time of modification."""
WEIGHT_SUFFIXES = (".json", ".safetensors", ".bin", ".model", ".jinja", ".txt")
"""Suffixes of the files of a folder that are read: weights, settings, tokenizers."""
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
"""Names of the parts of a model's weights, which its index lists."""
HEADER_BYTES = 1 << 20
"""Bytes reserved for a file's header, which is written last and padded with spaces."""
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of torch's dtypes in safetensors files."""


def find_home() -> Path:
    """Return the folder of converted weights: $KVBENCH_WEIGHTS, else ~/.cache/kvbench/weights."""
    return Path(os.environ.get("KVBENCH_WEIGHTS", "~/.cache/kvbench/weights")).expanduser()


def choose_files(names: Iterable[str]) -> list[str]:
    """Return the names of a folder's files that are read, sorted; weights in several formats only as safetensors.

    Documentation, time stamps of downloads, weights of other programs (such as `consolidated.safetensors`, a second
    copy in Mistral's repositories) and subfolders are omitted.

    >>> choose_files(["README.md", "config.json", "model.safetensors", "pytorch_model.bin", "onnx/model.onnx"])
    ['config.json', 'model.safetensors']
    """
    matches = sorted(
        name
        for name in names
        if "/" not in name and not name.startswith(".") and name.endswith(WEIGHT_SUFFIXES)
    )
    weights = [name for name in matches if name.endswith(".safetensors")]
    if not weights:
        return matches
    parts = [WHOLE] if WHOLE in weights else [name for name in weights if SHARD.fullmatch(name)]
    unread = set(weights).difference(parts or weights)
    return [name for name in matches if name not in unread and not name.endswith((".bin", ".bin.index.json"))]


def list_files(path: Path) -> list[Path]:
    """Return the files of a source that are read: the file itself, or files of a folder."""
    if not path.is_dir():
        return [path]
    return [path / name for name in choose_files(p.name for p in path.iterdir() if p.is_file())]


def find_digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of a folder's files that are read, as `digest_files`."""
    return digest_files(list_files(path))


def digest_files(files: Sequence[Path]) -> str:
    """Return the SHA-256 of files, one after another.

    Digests of large files are cached by path, size, time of modification and inode. One process hashes a file, others
    wait.

    Raises:
        OSError: a file cannot be read.
    """
    states = [(str(file.resolve()), file.stat()) for file in files]
    if sum(state.st_size for _, state in states) < MIN_CACHED_BYTES:
        return hash_files(files)
    key = hash_values([[name, s.st_size, s.st_mtime_ns, s.st_ino] for name, s in states])
    cached = find_home() / "digests" / key
    if cached.is_file():
        return read_text(cached)
    try:
        with claim(cached.with_name(f".{key}")):
            if cached.is_file():
                return read_text(cached)
            digest = hash_files(files)
            # A recent file may change again without a later time of modification.
            if time.time() - max(state.st_mtime for _, state in states) > SETTLING_TIME:
                write_whole(cached, digest)
            return digest
    except PermissionError:  # a shared cache may be read-only
        return hash_files(files)


def write_tensors(path: Path, groups: Iterable[Mapping[str, Tensor]], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically from groups of tensors, one group in memory at a time.

    Raises:
        OSError: the file cannot be written; the message names it.
        ValueError: a dtype is not supported, or the names do not fit into the header.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    with write_beside(path) as partial, partial.open("wb") as file:
        file.seek(8 + HEADER_BYTES)
        for group in groups:
            for name, tensor in group.items():
                if tensor.dtype not in DTYPES:
                    raise ValueError(f"{name} is {tensor.dtype}, which safetensors files do not support")
                size = tensor.numel() * tensor.element_size()
                entry = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
                header[name] = {**entry, "data_offsets": [end, end + size]}
                file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
                end += size
        text = json.dumps(header).encode()
        if len(text) > HEADER_BYTES:
            raise ValueError(f"{len(header)} names do not fit into the header of a safetensors file")
        file.seek(0)
        file.write(HEADER_BYTES.to_bytes(8, "little") + text.ljust(HEADER_BYTES))
        file.truncate(8 + HEADER_BYTES + end)


def stage(path: Path, digest: str) -> Path:
    """Return a copy of a file or folder on this node's disk, or the path itself if `$KVBENCH_STAGE` is not set.

    The copy is named by `digest`, the SHA-256 of its contents, and compared with it. One process of a node makes it,
    others wait.

    Raises:
        ConfigError: the disk is full, the folder cannot be written, or the copy differs from `digest`.
    """
    root = os.environ.get("KVBENCH_STAGE")
    if not root:
        return path
    folder = Path(os.path.expandvars(root)).expanduser() / digest[:16]
    pairs = [(file, folder / file.name) for file in list_files(path)]
    try:
        with claim(folder.with_name(f".{folder.name}")):
            _copy_changed(pairs, digest)
    except OSError as error:
        raise ConfigError(
            f"KVBENCH_STAGE={root}: cannot copy {path} there ({error.strerror or error}); free space or unset it"
        ) from None
    return folder if path.is_dir() else pairs[0][1]


def _copy_changed(pairs: Sequence[tuple[Path, Path]], digest: str) -> None:
    """Copy the sources of pairs (source, copy) unless the copies have `digest`, which `digest_files` caches."""
    copies = [copy for _, copy in pairs]
    exist = all(copy.is_file() for copy in copies)
    if exist and digest_files(copies) == digest:
        return
    if exist:
        log.warning("%s: the staged copy differs from its source; copied again", copies[0].parent)
    for source, copy in pairs:
        with write_beside(copy) as partial:
            shutil.copyfile(check_file(source), partial)
    if digest_files(copies) != digest:
        raise OSError("the copy differs from its source, which was changed or cannot be read reliably")
