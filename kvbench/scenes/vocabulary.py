"""Closed vocabularies of words in captions."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property

END = 1
"""Id of the end token; 0 is padding."""
MAX_LISTED = 60
"""Maximum number of words that a message lists."""


@dataclass(frozen=True)
class Vocabulary:
    """Words of a closed set of captions, with token ids from 2 on.

    Attributes:
        name: name of the vocabulary, for messages.
        words: all words, in lower case and without spaces.
        longest: maximum number of tokens of a caption, including the end token.
    """

    name: str
    words: tuple[str, ...]
    longest: int

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: token for token, word in enumerate(self.words, END + 1)}

    def __len__(self) -> int:
        return len(self.words) + END + 1

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a caption, followed by `END`.

        Raises:
            ValueError: a word is not in the vocabulary, or the caption is too long.
        """
        words = text.lower().split()
        if unknown := [word for word in words if word not in self._ids]:
            known = " ".join([word for word in words if word in self._ids][: self.longest - 1])
            hints = (self._list_near(unknown[0]), f"with its words alone: {known!r}" if known else "")
            why = f"the {self.name} vocabulary has no word {unknown[0][:40]!r}"
            raise ValueError("; ".join(filter(None, (f"prompt {text!r}: {why}", *hints))))
        if len(words) >= self.longest:
            raise ValueError(f"prompt {text!r}: {len(words)} words, at most {self.longest - 1} are allowed")
        return [*(self._ids[word] for word in words), END]

    def tokenize_filled(self, text: str) -> list[int]:
        """Return the token ids of a caption, padded with `END` to `longest`; raises the errors of `tokenize`."""
        ids = self.tokenize(text)
        return [*ids, *[END] * (self.longest - len(ids))]

    def check(self, texts: Iterable[str]) -> None:
        """Check that all captions can be tokenized; raises the errors of `tokenize`."""
        for text in texts:
            self.tokenize(text)

    def _list_near(self, word: str) -> str:
        if len(self.words) <= MAX_LISTED:
            return f"it has {' '.join(self.words)}"
        near = get_close_matches(word[:40], self.words, n=5)
        return f"nearest: {' '.join(near)}" if near else ""
