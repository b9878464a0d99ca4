"""Folders of texts that were read with forced tokens, with the predictions of every scored token."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from kvbench.core.files import check_file, parse_json
from kvbench.eval.files.samples import Sample, SampleSet, SampleSetError

COLUMNS = ("tokens", "likeliest", "likeliest_full", "kl", "nll", "nll_full")
FORCED = "forced"
"""Protocol of the metrics of texts that were read."""
STATES = "states"
"""Name of the full cache's hidden states, which its own run stores."""
LABELS = "labels"
"""Name of the metadata with `words` (an object by the token's number) and `groups`, JSON."""

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


class StoredReading(NamedTuple):
    """Scored tokens of one text, see `kvbench.models.outputs.ReadText`.

    Attributes:
        tokens: int32 [n], the text's own tokens; int64 for tokens of several bits.
        likeliest: int32 [n], the likeliest token under the method.
        likeliest_full: int32 [n], the likeliest token under the full cache.
        kl: float32 [n], KL(full || method) in nats.
        nll: float32 [n], negative log-probability of the own token under the method, in nats.
        nll_full: float32 [n], the same under the full cache.
        words: characters of every token that occurs, by its number; empty for an image.
        groups: tokens of each scale, or of each row, of an image; empty for a text.
    """

    tokens: Ints
    likeliest: Ints
    likeliest_full: Ints
    kl: Floats
    nll: Floats
    nll_full: Floats
    words: Mapping[int, str]
    groups: tuple[int, ...]

    @property
    def same(self) -> NDArray[np.bool_]:
        """Whether both caches find the same token likeliest, bool [n]."""
        return self.likeliest == self.likeliest_full


class ReadingSet(SampleSet):
    """Texts of a run by index: `readings/000017.safetensors` and a line in `samples.jsonl` for each.

    Raises:
        SampleSetError: records or files are missing, surplus, altered or damaged.
    """

    kind: ClassVar[str] = "readings"
    suffix: ClassVar[str] = ".safetensors"

    def reading(self, index: int) -> StoredReading:
        """Return the scored tokens of a text.

        Raises:
            SampleSetError: the file is damaged.
        """
        return read_stored(self._path(index))

    def readings(self) -> Iterator[tuple[int, StoredReading]]:
        """Yield index and scored tokens of all texts in order."""
        for index in self.indices:
            yield index, self.reading(index)

    def _checked(self, sample: Sample) -> Sample:
        super()._checked(sample)
        read_stored(self._path(sample.index))
        return sample


def read_stored(path: Path) -> StoredReading:
    """Read the scored tokens of a text from its file.

    Raises:
        SampleSetError: the file is damaged.
    """
    try:
        with safe_open(check_file(path), framework="np") as file:
            columns = {name: file.get_tensor(name) for name in COLUMNS}
            labels = parse_json((file.metadata() or {})[LABELS])
            words = {int(token): str(word) for token, word in labels["words"].items()}
            groups = tuple(labels["groups"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SampleSetError(f"{path}: not a text that was read ({error})") from None
    [shape, *others] = {column.shape for column in columns.values()}
    if others or len(shape) != 1 or not shape[0]:
        raise SampleSetError(f"{path}: its columns differ in length, or are empty")
    return StoredReading(**columns, words=words, groups=groups)


def strip_states(path: Path) -> bytes:
    """Return the file of a text without the full cache's hidden states.

    Raises:
        SampleSetError: the file is damaged.
    """
    one = read_stored(path)
    labels = json.dumps({"words": one.words, "groups": one.groups})
    return save({name: getattr(one, name) for name in COLUMNS}, {LABELS: labels})
