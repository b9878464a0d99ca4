"""Record of a text or image under forced decoding: both caches' predictions of its scored tokens, and its file."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from kvbench.core.files import check_file, parse_json

if TYPE_CHECKING:  # takes long to import
    from torch import Tensor

KIND = "readings"
"""Kind of the samples, and name of their folder in a run."""
COLUMNS = ("tokens", "likeliest", "likeliest_full", "kl", "nll", "nll_full")
STATES = "states"
"""Name of the tensor of hidden states, which the full cache's own run stores."""
LABELS = "labels"
"""Name of the metadata with `words` (an object by token id) and `groups`, JSON."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"

Unit = Literal["tokens", "row", "scale"]


@dataclass(frozen=True, eq=False)
class ScoredText:
    """Scored tokens of a text or image, with both caches' predictions of each from the tokens before it.

    Attributes:
        tokens: int32 [n], the text's own tokens; int64 for tokens of several bits.
        likeliest: top-1 token under the method, of the dtype of `tokens`.
        likeliest_full: top-1 token under the full cache, likewise.
        kl: float32 [n], KL(full || method) in nats.
        nll: float32 [n], negative log-probability of `tokens` under the method, in nats.
        nll_full: float32 [n], negative log-probability of `tokens` under the full cache, in nats.
        words: characters of every token that occurs, by token id; empty for an image.
        groups: tokens of each scale, or of each row, of an image; empty for a text.
        states: hidden states [n, ...] of the full cache's pass, for comparison; None under a method, and if read from
            a file.
    """

    tokens: NDArray[np.integer]
    likeliest: NDArray[np.integer]
    likeliest_full: NDArray[np.integer]
    kl: NDArray[np.float32]
    nll: NDArray[np.float32]
    nll_full: NDArray[np.float32]
    words: Mapping[int, str] = field(default_factory=dict)
    groups: tuple[int, ...] = ()
    states: "Tensor | None" = None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            ValueError: the file is damaged; the message names it.
        """
        try:
            with safe_open(check_file(path), framework="np") as file:
                columns = {name: file.get_tensor(name) for name in COLUMNS}
                labels = parse_json((file.metadata() or {})[LABELS])
                words = {int(token): str(word) for token, word in labels["words"].items()}
                groups = tuple(labels["groups"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not a record of forced decoding ({error})") from None
        [shape, *others] = {column.shape for column in columns.values()}
        if others or len(shape) != 1 or not shape[0]:
            raise ValueError(f"{path}: columns differ in length, or are empty")
        return cls(**columns, words=words, groups=groups)

    def encode(self) -> bytes:
        """Return the content of the record's file."""
        columns: dict[str, Any] = {name: getattr(self, name) for name in COLUMNS}
        labels = {LABELS: json.dumps({"words": self.words, "groups": self.groups})}
        if self.states is None:
            return save(columns, labels)
        import torch
        from safetensors.torch import save as save_tensors  # states may be bf16, which NumPy lacks

        tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
        return save_tensors({**tensors, STATES: self.states.contiguous()}, labels)

    def describe(self) -> dict[str, object]:
        """Return the record's additional fields in samples.jsonl."""
        return {} if self.groups else {"tokens": len(self.tokens)}

    @property
    def same(self) -> NDArray[np.bool_]:
        """Whether both caches have the same top-1 token, bool [n]."""
        return self.likeliest == self.likeliest_full

    @property
    def unit(self) -> Unit:
        """Unit of positions: `groups` of an image are rows if they are equally long, else scales."""
        if not self.groups:
            return "tokens"
        return "row" if len(set(self.groups)) == 1 else "scale"

    def name_token(self, token: int) -> str:
        """Return the characters of a token, or `#` and its id if they are unknown or empty."""
        return self.words.get(int(token)) or f"#{int(token)}"

    def find_before(self, prompt: str, position: int = 0) -> str:
        """Return the characters before a scored token, with the given ones if the scored text occurs in the prompt."""
        pieces = [self.words.get(int(token), "") for token in self.tokens]
        # A token that is a part of a character decodes to a replacement character.
        scored = ".{1,4}?".join(map(re.escape, re.split(f"{UNKNOWN}+", "".join(pieces))))
        starts = [match.start() for match in re.finditer(scored, prompt, re.DOTALL)] if any(pieces) else []
        return prompt[: starts[-1] if starts else 0] + "".join(pieces[:position])
