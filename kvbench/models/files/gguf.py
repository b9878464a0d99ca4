"""Reader of GGUF files, the format of llama.cpp: metadata, and tensors in floats or in quantised blocks.

The header is read here, with every length bounded by the file's size; the package `gguf` unpacks blocks.
"""

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.core.files import MAX_STREAMED, open_file

Value = bool | int | float | str | list[bool | int | float | str]
"""Value of a metadata key, or a list of values."""
MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Codes of `struct` by the type of a metadata value; 8 is a string, 9 an array."""
MAX_DIMENSIONS = 4


class TensorType(NamedTuple):
    """Element type of a tensor.

    Attributes:
        name: llama.cpp's name.
        block: consecutive elements of a row that are stored together.
        size: bytes of a block.
        dtype: dtype of unquantised elements; None for quantised blocks.
    """

    name: str
    block: int
    size: int
    dtype: torch.dtype | None = None


FLOATS = {
    0: TensorType("F32", 1, 4, torch.float32),
    1: TensorType("F16", 1, 2, torch.float16),
    30: TensorType("BF16", 1, 2, torch.bfloat16),
}
"""Element types that are read without the package `gguf`, by their id in files."""


@cache
def _find_type(number: int) -> TensorType:
    """Return an element type by its id in files; `gguf` has the sizes of quantised blocks, and unpacks most of them."""
    if number in FLOATS:
        return FLOATS[number]
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise ValueError("not float16/32 or bfloat16; pip install 'kvbench[gguf]' to read it") from None
    try:
        block, size = GGML_QUANT_SIZES[kind := GGMLQuantizationType(number)]
        dequantize(np.zeros((1, size), np.uint8), kind)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"of type {number}, which is not unpacked ({error}); use the model's safetensors"
        ) from None
    return TensorType(kind.name, block, size)


@dataclass(frozen=True)
class PackedTensor:
    """Tensor of a mapped file, unpacked on demand.

    Attributes:
        type: element type.
        shape: slowest dimension first.
        data: uint8 [bytes], mapped from the file.
        paired: D if a rotation pairs channels 2j and 2j + 1 of rows [heads x D, ...]; `unpack` returns them in the
            order of the Hugging Face Hub's files, which pair j and j + D/2. None for rows that keep their order.
    """

    type: TensorType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    paired: int | None = None

    def unpack(self) -> Tensor:
        """Return the values in a new tensor: float32, or the file's dtype if it is unquantised."""
        kind = self.type
        if kind.dtype is not None:
            whole = torch.from_numpy(self.data.copy()).view(kind.dtype).reshape(self.shape)
        else:
            from gguf.constants import GGMLQuantizationType
            from gguf.quants import dequantize

            rows = self.data.reshape(-1, self.shape[-1] // kind.block * kind.size)
            values = dequantize(rows, GGMLQuantizationType[kind.name])
            whole = torch.from_numpy(values).reshape(self.shape)
        if self.paired is None:
            return whole
        return whole.unflatten(0, (-1, self.paired // 2, 2)).transpose(1, 2).flatten(0, 2)


class Gguf(NamedTuple):
    """Metadata and tensors of a GGUF file."""

    metadata: Mapping[str, Value]
    tensors: Mapping[str, PackedTensor]


class _Cursor:
    """Reader of a file's header; a read past the end raises a ValueError before memory is allocated."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.position = data, 0

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self._data):
            raise ValueError(
                f"truncated: the header needs {end} bytes or more, the file has {len(self._data)}; copy it again"
            )
        start, self.position = self.position, end
        return self._data[start:end]

    def read(self, code: str) -> tuple[bool | int | float, ...]:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))

    def read_count(self, code: str = "Q") -> int:
        return int.from_bytes(self.take(struct.calcsize(f"<{code}")), "little")

    def read_text(self) -> str:
        return self.take(self.read_count()).decode()

    def read_value(self, kind: int) -> Value:
        if kind == STRING:
            return self.read_text()
        if kind in NUMBERS:
            return self.read(NUMBERS[kind])[0]
        inner, count = (self.read_count("I"), self.read_count()) if kind == ARRAY else (kind, 0)
        if inner == STRING:
            return [self.read_text() for _ in range(count)]
        if inner not in NUMBERS:
            raise ValueError(f"values of type {inner} are not supported; convert it again")
        width = struct.calcsize(NUMBERS[inner])
        return [value for (value,) in struct.iter_unpack(f"<{NUMBERS[inner]}", self.take(count * width))]


def read_gguf(path: Path) -> Gguf:
    """Read a file's metadata and map its tensors without reading them.

    Every length is compared with the file's size before memory is allocated for it.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is truncated, of another format or version, or an element type is not supported.
    """
    with open_file(path, MAX_STREAMED) as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin with GGUF; download it again")
        cursor = _Cursor(data := mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    cursor.take(len(MAGIC))
    if (version := cursor.read_count("I")) not in VERSIONS:
        raise ValueError(f"it has GGUF version {version}, only 2 and 3 are supported; convert it again")
    tensors, keys = cursor.read_count(), cursor.read_count()
    metadata = dict(_read_metadata(cursor, keys))
    placed = list(_read_tensors(cursor, tensors))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment}, must be a positive integer; convert it again")
    start = -(-cursor.position // alignment) * alignment
    end = start + max((offset + size for *_, offset, size in placed), default=0)
    if end > len(data):
        raise ValueError(f"truncated: tensors need {end} bytes, the file has {len(data)}; copy it again")
    whole = np.frombuffer(data, np.uint8)
    return Gguf(
        metadata,
        {
            name: PackedTensor(kind, shape, whole[start + offset : start + offset + size])
            for name, kind, shape, offset, size in placed
        },
    )


def _read_metadata(cursor: _Cursor, count: int) -> Iterator[tuple[str, Value]]:
    for _ in range(count):
        key = cursor.read_text()
        try:
            yield key, cursor.read_value(cursor.read_count("I"))
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None


def _read_tensors(cursor: _Cursor, count: int) -> Iterator[tuple[str, TensorType, tuple[int, ...], int, int]]:
    """Yield name, element type, shape, offset after the header and size in bytes of every tensor."""
    names = set()
    for _ in range(count):
        name, dimensions = cursor.read_text(), cursor.read_count("I")
        if name in names:
            raise ValueError(f"it has two tensors {name}; download it again")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions, at most {MAX_DIMENSIONS} are possible")
        names.add(name)
        shape = tuple(reversed([cursor.read_count() for _ in range(dimensions)]))
        number, offset = cursor.read_count("I"), cursor.read_count()
        try:
            kind = _find_type(number)
        except ValueError as error:
            raise ValueError(f"{name} is {error}") from None
        if not (row := shape[-1] if shape else 1) or row % kind.block:
            raise ValueError(
                f"{name} has rows of {row} elements; {kind.name} needs a positive multiple of {kind.block}"
            )
        yield name, kind, shape, offset, math.prod(shape) // kind.block * kind.size
