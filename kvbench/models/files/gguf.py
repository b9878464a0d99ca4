"""Reader of GGUF files, the format of llama.cpp: metadata, and tensors in floats or in blocks of 4 or 8 bits."""

import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Value = bool | int | float | str | list[bool | int | float | str]
"""Value of a metadata key."""
MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Codes of `struct` by the type of a metadata value; 8 is a string, 9 an array."""
BLOCK = 32
"""Numbers of a quantised block, which has a scale of its own."""
MAX_DIMENSIONS = 4
OTHERS = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Names of the tensor types that are not read, by number."""


class TensorType(NamedTuple):
    """Storage of a tensor's numbers.

    Attributes:
        name: llama.cpp's name.
        numbers: consecutive numbers of a row that are stored together.
        size: bytes of these numbers.
        unpack: maps bytes uint8 [blocks, size] to float32 [blocks, numbers]; None if the bytes are numbers of `dtype`.
        dtype: of the unpacked tensor.
    """

    name: str
    numbers: int
    size: int
    unpack: Callable[[NDArray[np.uint8]], NDArray[np.float32]] | None = None
    dtype: torch.dtype = torch.float32


def _read_halves(blocks: NDArray[np.uint8], column: int) -> NDArray[np.float32]:
    """Return the float16 at a column of every block, float32 [blocks, 1]."""
    halves: NDArray[np.float32] = blocks[:, column : column + 2].copy().view("<f2").astype(np.float32)
    return halves


def _split_bytes(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the low halves of a block's bytes, then the high ones, uint8 [blocks, 32]."""
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def _unpack_q4_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _read_halves(blocks, 0) * (_split_bytes(blocks[:, 2:]).view(np.int8) - np.int8(8))


def _unpack_q4_1(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _read_halves(blocks, 0) * _split_bytes(blocks[:, 4:]) + _read_halves(blocks, 2)


def _unpack_q8_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _read_halves(blocks, 0) * blocks[:, 2:].view(np.int8)


TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2, dtype=torch.float16),
    2: TensorType("Q4_0", BLOCK, 18, _unpack_q4_0),
    3: TensorType("Q4_1", BLOCK, 20, _unpack_q4_1),
    8: TensorType("Q8_0", BLOCK, 34, _unpack_q8_0),
    30: TensorType("BF16", 1, 2, dtype=torch.bfloat16),
}
"""Tensor types that are read, by number."""


@dataclass(frozen=True)
class PackedTensor:
    """A tensor of a mapped file, unpacked on demand.

    Attributes:
        type: storage of its numbers.
        shape: slowest dimension first.
        data: its bytes, uint8 [bytes], mapped from the file.
        paired: D if a rotation pairs channels 2j and 2j + 1 of rows [heads x D, ...]; `unpack` returns them in the
            order of the Hugging Face Hub's files, which pair j and j + D/2. None for rows that keep their order.
    """

    type: TensorType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    paired: int | None = None

    def unpack(self) -> Tensor:
        """Return the numbers in memory of their own, float32 or, of unquantised types, the file's dtype."""
        if self.type.unpack is None:
            whole = torch.from_numpy(self.data.copy()).view(self.type.dtype).reshape(self.shape)
        else:
            numbers = self.type.unpack(self.data.reshape(-1, self.type.size))
            whole = torch.from_numpy(numbers).reshape(self.shape)
        if self.paired is None:
            return whole
        return whole.unflatten(0, (-1, self.paired // 2, 2)).transpose(1, 2).flatten(0, 2)


class Gguf(NamedTuple):
    """Contents of a GGUF file."""

    metadata: Mapping[str, Value]
    tensors: Mapping[str, PackedTensor]


class _Cursor:
    """Reads a file's header; a read past the end raises before it allocates memory."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.position = data, 0

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self._data):
            raise ValueError(
                f"it is truncated: its header needs {end} bytes or more, it has {len(self._data)}"
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
            raise ValueError(f"values of type {inner} are not known")
        width = struct.calcsize(NUMBERS[inner])
        return [one for (one,) in struct.iter_unpack(f"<{NUMBERS[inner]}", self.take(count * width))]


def read_gguf(path: Path) -> Gguf:
    """Read a file's metadata and map its tensors, of which nothing is read yet.

    Every length is compared with the file's size before memory is allocated for it.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is truncated, of another format or version, or a tensor is stored in a type that is not read.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        cursor = _Cursor(data := mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    cursor.take(len(MAGIC))
    if (version := cursor.read_count("I")) not in VERSIONS:
        raise ValueError(f"it has GGUF's version {version}, but versions 2 and 3 are read; convert it anew")
    tensors, keys = cursor.read_count(), cursor.read_count()
    metadata = dict(_read_metadata(cursor, keys))
    placed = list(_read_tensors(cursor, tensors))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment}, must be a positive number")
    start = -(-cursor.position // alignment) * alignment
    end = start + max((offset + size for *_, offset, size in placed), default=0)
    if end > len(data):
        raise ValueError(f"it is truncated: its tensors need {end} bytes, it has {len(data)}; copy it again")
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
    """Yield name, type, shape, offset behind the header and size in bytes of every tensor."""
    names = set()
    for _ in range(count):
        name, dimensions = cursor.read_text(), cursor.read_count("I")
        if name in names:
            raise ValueError(f"it has two tensors {name}; get another copy")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions, at most {MAX_DIMENSIONS} are possible")
        names.add(name)
        shape = tuple(reversed([cursor.read_count() for _ in range(dimensions)]))
        number, offset = cursor.read_count("I"), cursor.read_count()
        kind = TYPES.get(number)
        if kind is None:
            wanted = ", ".join(one.name for one in TYPES.values())
            named = (
                f"{OTHERS[number]} (type {number})" if number in OTHERS else f"of the unknown type {number}"
            )
            raise ValueError(f"{name} is {named}; use a file in {wanted}, or the model's safetensors")
        if (row := shape[-1] if shape else 1) % kind.numbers:
            raise ValueError(f"{name} has rows of {row} numbers, but {kind.name} needs multiples of {BLOCK}")
        yield name, kind, shape, offset, math.prod(shape) // kind.numbers * kind.size
