"""A byte-level tokenizer without merges, as published ones are built."""

from collections.abc import Iterable
from pathlib import Path

TEXT = "Two  blue rings, café!"


def write_byte_tokenizer(path: Path, special: Iterable[str], words: dict[str, int], first: int) -> Path:
    """Write a `tokenizer.json` with special tokens, words, and one token a byte from number `first` on."""
    import tokenizers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = words | {letter: first + i for i, letter in enumerate(letters)}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    built.add_special_tokens(
        [tokenizers.AddedToken(name, special=True, normalized=False) for name in special]
    )
    built.save(str(path))
    return path
