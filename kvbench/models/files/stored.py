"""Weights on disk: digests that are remembered, converted files that are written tensor by tensor, a node's own copies.

All of it lies in `$KVBENCH_WEIGHTS`, ~/.cache/kvbench/weights by default, but for the copies, which are in
`$KVBENCH_STAGE`.
"""

import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from kvbench.core.claims import claim
from kvbench.core.config import ConfigError
from kvbench.core.files import hash_files, hash_values, write_beside, write_whole

REMEMBERED = 1 << 26
"""Bytes from which a digest is remembered; fewer are hashed in a tenth of a second."""
SETTLED = 2.0
"""Seconds without a change after which a file's time of modification tells it from what it was before."""
READ = (".json", ".safetensors", ".bin", ".model", ".jinja", ".txt")
"""Endings of the files of a folder that are read: weights, settings, tokenizers."""
HEADER = 1 << 20
"""Bytes of the header of a file that is written before its names are known; spaces fill it up."""
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names that safetensors files give to dtypes."""


def find_home() -> Path:
    """Return the folder of converted weights: $KVBENCH_WEIGHTS, else ~/.cache/kvbench/weights."""
    return Path(os.environ.get("KVBENCH_WEIGHTS", "~/.cache/kvbench/weights")).expanduser()


def choose_files(names: Iterable[str]) -> list[str]:
    """Return the files of a folder that are read, sorted: of weights in several formats only safetensors.

    Documentation, time stamps of downloads, weights of other programs, and folders inside are left out.

    >>> choose_files(["README.md", "config.json", "model.safetensors", "pytorch_model.bin", "onnx/model.onnx"])
    ['config.json', 'model.safetensors']
    """
    found = sorted(
        name for name in names if "/" not in name and not name.startswith(".") and name.endswith(READ)
    )
    if any(name.endswith(".safetensors") for name in found):
        return [name for name in found if not name.endswith((".bin", ".bin.index.json"))]
    return found


def list_files(path: Path) -> list[Path]:
    """Return the files that are read of a source: itself, or those of a folder."""
    if not path.is_dir():
        return [path]
    return [path / name for name in choose_files(p.name for p in path.iterdir() if p.is_file())]


def find_digest(path: Path) -> str:
    """Return the SHA-256 of what is read of a file or folder, its files one after another.

    Digests of large files are remembered by path, size, time of modification and inode. Of processes that want the same
    one, one hashes and the others wait.

    Raises:
        OSError: a file cannot be read.
    """
    files = list_files(path)
    states = [(str(file.resolve()), file.stat()) for file in files]
    if sum(state.st_size for _, state in states) < REMEMBERED:
        return hash_files(files)
    key = hash_values([[name, s.st_size, s.st_mtime_ns, s.st_ino] for name, s in states])
    memory = find_home() / "digests" / key
    if memory.is_file():
        return memory.read_text()
    try:
        with claim(memory.with_name(f".{key}")):
            if memory.is_file():
                return memory.read_text()
            digest = hash_files(files)
            # A file that was written a moment ago may be written again without a later time.
            if time.time() - max(state.st_mtime for _, state in states) > SETTLED:
                write_whole(memory, digest)
            return digest
    except PermissionError:  # of a cache that is shared and cannot be written
        return hash_files(files)


def write_tensors(path: Path, groups: Iterable[Mapping[str, Tensor]], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file out of groups of tensors, of which one at a time is in memory.

    Args:
        path: the file; it appears whole or not at all.
        groups: tensors by name, in their dtypes.
        metadata: texts of the header.

    Raises:
        OSError: it cannot be written; the message names it.
        ValueError: a dtype that such files do not have, or more names than fit into the header.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    with write_beside(path) as beside, beside.open("wb") as file:
        file.seek(8 + HEADER)
        for group in groups:
            for name, tensor in group.items():
                if tensor.dtype not in DTYPES:
                    raise ValueError(f"{name} is {tensor.dtype}, which safetensors files do not hold")
                size = tensor.numel() * tensor.element_size()
                place = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
                header[name] = {**place, "data_offsets": [end, end + size]}
                file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
                end += size
        text = json.dumps(header).encode()
        if len(text) > HEADER:
            raise ValueError(f"{len(header)} names do not fit into the header of a safetensors file")
        file.seek(0)
        file.write(HEADER.to_bytes(8, "little") + text.ljust(HEADER))
        file.truncate(8 + HEADER + end)


def stage(path: Path, digest: str) -> Path:
    """Return a copy on this node's disk of what is read of a file or folder; itself without `$KVBENCH_STAGE`.

    The copy is named by the content. Of processes of a node one makes it, and the others wait.

    Raises:
        ConfigError: the disk has no room, or the folder cannot be written.
    """
    root = os.environ.get("KVBENCH_STAGE")
    if not root:
        return path
    folder = Path(os.path.expandvars(root)).expanduser() / digest[:16]
    pairs = [(file, folder / file.name) for file in list_files(path)]
    try:
        with claim(folder.with_name(f".{folder.name}")):
            for source, copy in pairs:
                if not copy.is_file() or copy.stat().st_size != source.stat().st_size:
                    with write_beside(copy) as beside:
                        shutil.copyfile(source, beside)
    except OSError as error:
        raise ConfigError(
            f"KVBENCH_STAGE={root}: cannot copy {path} there ({error.strerror or error}); free space or unset it"
        ) from None
    return folder if path.is_dir() else pairs[0][1]
