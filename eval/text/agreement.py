"""Agreement of generated texts with the full cache's texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvbench.eval.files.texts import TextSet, find_difference
from kvbench.eval.protocol.base import Evaluator, Result, make_result
from kvbench.eval.protocol.scores import MetricSpec, mean_score, share_score


@dataclass(frozen=True)
class Agreement(Evaluator):
    """`agreement`: share of a text before its first difference to the reference's; `same_text`: share of equal texts.

    `agreement` is the number of equal characters before the first difference, divided by the length of the longer text,
    averaged over texts. A different token changes all later tokens, so a low value shows an early difference, not a bad
    text.
    """

    name: ClassVar[str] = "agreement"
    protocol: ClassVar[str] = "characters"
    needs_reference: ClassVar[bool] = True
    reads: ClassVar[str] = TextSet.kind
    meta_keys: ClassVar[tuple[str, ...]] = ()
    metrics: ClassVar[Mapping[str, MetricSpec]] = {
        "agreement": MetricSpec("higher", digits=3),
        "same_text": MetricSpec("higher", digits=3),
    }

    def run(self, texts: TextSet, reference: TextSet | None, device: str) -> Result:
        """Return the agreement of every text with its reference, and the means."""
        assert reference is not None
        shares, same = [], []
        for index, text in texts.read(self.name):
            other = reference.text(index)
            first = find_difference(text, other)
            shares.append(1.0 if first is None else first / max(len(text), len(other)))
            same.append(float(first is None))
        scores = {
            "agreement": mean_score(shares, texts.clusters),
            "same_text": share_score(same, texts.clusters),
        }
        return make_result(self, scores, {"index": texts.indices, "agreement": shares, "same_text": same})
