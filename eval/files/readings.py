"""Folders of texts that were scored by forced decoding."""

from collections.abc import Iterator
from typing import ClassVar

from kvbench.eval.files.samples import Sample, SampleSet, SampleSetError
from kvbench.forced.record import KIND, ScoredText

FORCED = "forced"
"""Protocol of the metrics of texts under forced decoding."""


class ReadingSet(SampleSet):
    """Scored texts of a run by index, each with `readings/000017.safetensors` and a line in `samples.jsonl`.

    Raises:
        SampleSetError: records or files are missing, surplus, altered or damaged.
    """

    kind: ClassVar[str] = KIND
    suffix: ClassVar[str] = ".safetensors"

    def reading(self, index: int) -> ScoredText:
        """Return the scores of a text; raise SampleSetError if the file is damaged."""
        try:
            return ScoredText.read(self._path(index))
        except ValueError as error:
            raise SampleSetError(str(error)) from None

    def readings(self) -> Iterator[tuple[int, ScoredText]]:
        """Yield index and scores of all texts in order."""
        for index in self.indices:
            yield index, self.reading(index)

    def _checked(self, sample: Sample) -> Sample:
        super()._checked(sample)
        self.reading(sample.index)
        return sample
