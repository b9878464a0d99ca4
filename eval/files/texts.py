"""Folders of generated texts."""

from collections.abc import Iterator
from typing import ClassVar

from kvbench.core.bars import make_bar
from kvbench.core.files import read_bytes
from kvbench.eval.files.samples import Sample, SampleSet, SampleSetError


class TextSet(SampleSet):
    """Texts of a run by index, each with `texts/000017.txt` in UTF-8 and a line in `samples.jsonl`.

    Raises:
        SampleSetError: records or texts are missing, surplus, altered or not UTF-8, or a record has no `tokens`.
    """

    kind: ClassVar[str] = "texts"
    suffix: ClassVar[str] = ".txt"

    def text(self, index: int) -> str:
        """Return the generated text of a sample, without its prompt."""
        return read_bytes(self._path(index)).decode()

    def read(self, title: str) -> Iterator[tuple[int, str]]:
        """Yield index and text of all samples in order, with a progress bar."""
        for index in make_bar(iterable=self.indices, desc=title, unit="text", mininterval=1.0):
            yield index, self.text(index)

    def _checked(self, sample: Sample) -> Sample:
        try:
            self._read(sample).decode()
        except UnicodeDecodeError as error:
            raise SampleSetError(f"{self._path(sample.index)} is not UTF-8: {error}") from None
        if type(sample.tokens) is not int:
            raise SampleSetError(f"{self.folder}: sample {sample.index} has no `tokens` in samples.jsonl")
        return sample


def find_difference(text: str, other: str) -> int | None:
    """Return the index of the first character that differs, from 0; None for equal texts.

    >>> find_difference("a red circle", "a red cube"), find_difference("so", "so on"), find_difference("so", "so")
    (7, 2, None)
    """
    pairs = zip(text, other, strict=False)
    indices = (index for index, (first, second) in enumerate(pairs) if first != second)
    return next(indices, None if text == other else min(len(text), len(other)))
