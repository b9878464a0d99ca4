"""Fidelity to the full cache's predictions under forced decoding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvbench.eval.files.readings import FORCED, ReadingSet
from kvbench.eval.protocol.base import Evaluator, Result, make_result
from kvbench.eval.protocol.intervals import leave_out, resample_statistic
from kvbench.eval.protocol.scores import MetricSpec, Score, mean_score, with_interval
from kvbench.forced.record import ScoredText

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ForcedScore(Evaluator):
    """Base class of metrics of scored texts; their intervals resample texts."""

    protocol: ClassVar[str] = FORCED
    reads: ClassVar[str] = ReadingSet.kind
    meta_keys: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class Kl(ForcedScore):
    """`kl`: KL divergence from the method's next-token distribution to the full cache's, KL(full || method), in nats.

    `kl` is the mean over texts of the mean over a text's scored tokens. `kl_p95` and `kl_p99` are quantiles over the
    scored tokens of all texts.
    """

    name: ClassVar[str] = "kl"
    metrics: ClassVar[Mapping[str, MetricSpec]] = {
        "kl": MetricSpec("lower", "nats"),
        "kl_p95": MetricSpec("lower", "nats"),
        "kl_p99": MetricSpec("lower", "nats", digits=3),
    }

    def run(self, texts: ReadingSet, reference: ReadingSet | None, device: str) -> Result:
        """Return the mean over texts, and quantiles over all tokens."""
        tokens = [reading.kl.astype(np.float64) for _, reading in texts.readings()]
        means = [float(values.mean()) for values in tokens]
        scores = {
            "kl": mean_score(means, texts.clusters),
            **{
                f"kl_p{percent}": _score_quantile(tokens, percent / 100, texts.clusters)
                for percent in (95, 99)
            },
        }
        return make_result(self, scores, {"index": texts.indices, "kl": means})


@dataclass(frozen=True)
class SameTop1(ForcedScore):
    """`same_top1`: share of scored tokens at which method and full cache have the same top-1."""

    name: ClassVar[str] = "same_top1"
    metric: ClassVar[str] = name
    spec: ClassVar[MetricSpec] = MetricSpec("higher")

    def run(self, texts: ReadingSet, reference: ReadingSet | None, device: str) -> Result:
        """Return the share of each text's tokens with the same top-1, and the mean over texts."""
        shares = [float(reading.same.mean()) for _, reading in texts.readings()]
        return make_result(
            self,
            {"same_top1": mean_score(shares, texts.clusters)},
            {"index": texts.indices, "same_top1": shares},
        )


@dataclass(frozen=True)
class Perplexity(ForcedScore):
    """`perplexity` of the texts, and `nll_change`: mean change of a token's negative log-likelihood, in nats.

    `perplexity` is exp of the mean over texts of the mean negative log-likelihood of a text's scored tokens under the
    method, `perplexity_full` under the full cache; exp(`nll_change`) is their ratio.
    """

    name: ClassVar[str] = "perplexity"
    metrics: ClassVar[Mapping[str, MetricSpec]] = {
        "perplexity": MetricSpec("lower", digits=3),
        "nll_change": MetricSpec("lower", "nats"),
        "perplexity_full": MetricSpec("lower", digits=3, detail=True),
    }

    def run(self, texts: ReadingSet, reference: ReadingSet | None, device: str) -> Result:
        """Return both perplexities, and the mean over texts of the change of the negative log-likelihood."""
        readings = [reading for _, reading in texts.readings()]
        ours, full = (_average(readings, name) for name in ("nll", "nll_full"))
        changes = [float(a - b) for a, b in zip(ours, full, strict=True)]
        scores = {
            "perplexity": _score_exponential(ours, texts.clusters),
            "nll_change": mean_score(changes, texts.clusters),
            "perplexity_full": _score_exponential(full, texts.clusters),
        }
        columns = {"index": texts.indices, "nll": list(ours), "nll_full": list(full), "nll_change": changes}
        return make_result(self, scores, columns)


def _average(readings: Sequence[ScoredText], name: str) -> Floats:
    """Return the mean of a column over the tokens of each text, float64 [texts]."""
    return np.array([getattr(reading, name).mean(dtype=np.float64) for reading in readings])


def _score_exponential(means: Floats, clusters: Sequence[str]) -> Score:
    """Return exp of the mean over texts, with exp of the mean's interval, and replicates."""
    mean = mean_score(means.tolist(), clusters)
    value = float(np.exp(means.mean()))
    ends = None if mean.ci95 is None else np.exp(np.array(mean.ci95, np.float64)).tolist()
    score = Score(value, mean.n, ci=mean.ci, ci95=ends and (ends[0], ends[1]))

    def find(positions: NDArray[np.int64]) -> float:
        return float(np.exp(means[positions].mean()))

    return replace(score, se=mean.se and value * mean.se, replicates=leave_out(find, clusters))


def _score_quantile(tokens: Sequence[Floats], share: float, clusters: Sequence[str]) -> Score:
    """Return a quantile over the tokens of all texts; its interval resamples texts."""

    def find(positions: NDArray[np.int64]) -> float:
        return float(np.quantile(np.concatenate([tokens[position] for position in positions]), share))

    value = find(np.arange(len(tokens)))
    return with_interval(Score(value, len(tokens)), resample_statistic(find, value, clusters))
