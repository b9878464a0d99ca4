"""Images as lines of tokens, drawn by a decoder whose vocabulary includes the image codes; a token ends each line."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.models.parts.decoder import PromptedImageConfig

SPECIAL = 6
"""Number of special tokens, neither words nor codes, that a text and its image need."""


@dataclass(frozen=True, kw_only=True)
class LinedImageConfig(PromptedImageConfig):
    """Shape of a language model that draws; `vocabulary` counts all tokens, image tokens too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocabulary <= self.codes + SPECIAL:
            raise ValueError(
                f"model.transformer.vocabulary={self.vocabulary}: codes={self.codes} and {SPECIAL} special tokens "
                "leave no words"
            )

    @property
    def line(self) -> int:
        """Tokens of a line, its codes and a newline; the last line has a newline too."""
        return self.image[1] + 1


def forbid(codes: Tensor, newline: int, line: int) -> Callable[[int], Tensor]:
    """Return a function from an image token's number, from 0, to the tokens that it cannot be, bool [tokens].

    Args:
        codes: int64 [tokens], the image code of each token, -1 where it is not a code.
        newline: token that ends a line, and only a line.
        line: tokens of a line, its newline included.
    """
    others, words = torch.arange(len(codes), device=codes.device) != newline, codes < 0
    return lambda token: words if (token + 1) % line else others


def read_codes(
    vocabulary: Mapping[str, int], pattern: str, number: Callable[[str], int], first: int, codes: int
) -> Tensor:
    """Return the code of every token, int64 [first + codes], -1 where it is none.

    Args:
        vocabulary: numbers of tokens by name.
        pattern: regular expression of the names of image tokens, whose group spells the code.
        number: returns the code that a group spells.
        first: number of the first image token.
        codes: number of image codes.

    Raises:
        ValueError: the image tokens are not `codes` consecutive ones from `first` on with each code once.
    """
    matches = ((re.fullmatch(pattern, name), token) for name, token in vocabulary.items())
    found = {token: number(match[1]) for match, token in matches if match}
    if sorted(found) != [*range(first, first + codes)] or sorted(found.values()) != [*range(codes)]:
        raise ValueError(f"its image tokens are not {codes} codes from number {first} on")
    return torch.tensor([-1] * first + [found[token] for token in sorted(found)])
