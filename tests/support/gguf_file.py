"""GGUF files as ggml's specification describes them, written without the reader's code."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

Stored = tuple[Sequence[int], int, bytes]
"""Dimensions of a tensor, fastest first as in the file, number of its type, and its bytes."""
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
SPELLED = {byte: chr(byte) for byte in BYTES} | {
    byte: chr(256 + place) for place, byte in enumerate(one for one in range(256) if one not in BYTES)
}
"""Characters of bytes in byte-level vocabularies (GPT-2's `bytes_to_unicode`)."""
TINY = {
    "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 64,
    "llama.embedding_length": 4, "llama.feed_forward_length": 4, "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1, "llama.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
"""Smallest metadata of a language model."""


def spell(text: str) -> str:
    return "".join(SPELLED[byte] for byte in text.encode())


def byte_vocabulary(
    pre: str, *, joined: Sequence[str] = ("a|b",), control: Sequence[str] = ()
) -> dict[str, object]:
    """Metadata of a tokenizer with all bytes, merges ("a|b" joins a and b), and control tokens."""
    words = ["".join(map(spell, pair.split("|"))) for pair in joined]
    merges = [" ".join(map(spell, pair.split("|"))) for pair in joined]
    tokens = [*SPELLED.values(), *words, *control]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*[1] * (len(tokens) - len(control)), *[3] * len(control)],
        "tokenizer.ggml.merges": merges,
    }


def write_gguf(
    path: Path,
    metadata: Mapping[str, object],
    tensors: Mapping[str, Stored],
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> Path:
    """Write a file; `counts` replaces the numbers of tensors and keys that the header names."""
    header = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(metadata))))
    header += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, (dimensions, kind, content) in tensors.items():
        header += _text(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        header += struct.pack("<IQ", kind, len(data))
        data += _pad(content)
    path.write_bytes(_pad(header) + data)
    return path


def _pad(content: bytes) -> bytes:
    return content + bytes(-len(content) % 32)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: object) -> bytes:
    if isinstance(value, bytes):  # as it is, type included
        return value
    if isinstance(value, list):
        kinds = [_value(one) for one in value]
        count = struct.pack("<Q", len(kinds))
        return struct.pack("<I", 9) + kinds[0][:4] + count + b"".join(k[4:] for k in kinds)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)
