"""Length of generated texts, and share of truncated texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvbench.eval.files.texts import TextSet
from kvbench.eval.protocol.base import Evaluator, Result, make_result
from kvbench.eval.protocol.scores import MetricSpec, mean_score, share_score


@dataclass(frozen=True)
class TextLength(Evaluator):
    """`generated_tokens`: mean tokens of a text, including its end; `truncated`: share of texts without an end."""

    name: ClassVar[str] = "text_length"
    protocol: ClassVar[str] = "tokens"
    reads: ClassVar[str] = TextSet.kind
    meta_keys: ClassVar[tuple[str, ...]] = ()
    metrics: ClassVar[Mapping[str, MetricSpec]] = {
        "generated_tokens": MetricSpec("lower", "tokens", digits=1),
        "truncated": MetricSpec("lower", digits=3),
    }

    def run(self, texts: TextSet, reference: TextSet | None, device: str) -> Result:
        """Return lengths and ends of texts from their records."""
        samples = texts.samples.values()
        tokens = [float(sample.tokens or 0) for sample in samples]
        cut = [float(not sample.ended) for sample in samples]
        scores = {
            "generated_tokens": mean_score(tokens, texts.clusters),
            "truncated": share_score(cut, texts.clusters),
        }
        return make_result(
            self, scores, {"index": texts.indices, "generated_tokens": tokens, "truncated": cut}
        )
