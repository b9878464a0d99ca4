"""Expected attention: scores by the attention expected from future queries."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.expected.queries import (
    average_rotation,
    expect_logits,
    fit_gaussian,
    read_queries,
    rotate_gaussian,
)
from kvbench.methods.shared.calibration import Artifact, Observer, require_artifact
from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.scored import AdaptiveHeads
from kvbench.methods.shared.select import find_leading, softmax_seen, split_even_odd
from kvbench.methods.shared.utility import measure_output
from kvbench.methods.shared.view import View


@dataclass
class QueryGaussians(Observer):
    """Gaussian of the scaled queries of each KV head, over conditional sequences.

    In next-scale models queries are rotated, and `mean` [L, H, K, D] has one mean per scale; in next-token models they
    are not rotated. `moment` [L, H, D, D] is the second moment, weighted by tokens, over all scales, or over all
    segments after the prompt in next-token models. Query heads that share a KV head are pooled.
    """

    kind: ClassVar[str] = "query_gaussians"

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `mean`, [L, H, K, D], and `moment`, [L, H, D, D]."""
        heads, channels = (spec.layers, spec.heads), spec.head_dim
        return {"mean": (*heads, len(spec.segments), channels), "moment": (*heads, channels, channels)}

    def accumulate(self, view: View) -> None:
        """Add the segment's queries to the sums."""
        scales, k = self.spec.family == "next-scale", view.segment.index
        if not scales and k == 0:
            return  # a prompt's queries, some of them padding, do not represent later queries
        queries = view.queries(torch.arange(view.segment.length), rotated=scales).double().flatten(1, 2)
        tokens = sum(weigh_segments(self.spec))
        self.sums["mean"][view.layer, :, k] += self.select_conditional(queries.mean(1)).sum(0)
        moment = queries.mT @ queries / queries.shape[1] * (view.segment.length / tokens)
        self.sums["moment"][view.layer] += self.select_conditional(moment).sum(0)


def weigh_segments(spec: ModelSpec) -> list[int]:
    """Return the weight of each segment in a calibration: its tokens, 0 for the prompt of a next-token model."""
    return [0 if spec.family == "next-token" and not s.index else s.length for s in spec.segments]


@dataclass
class ExpectedAttention(AdaptiveHeads):
    """Score slots by the attention expected from future queries, times the norm of the value (arXiv:2510.00636).

    Queries before rotation are modelled as Gaussian and rotated by the mean rotation of the next positions. A slot's
    score is the softmax over slots of ln E exp(q k), averaged over query heads, plus epsilon, times the norm of its
    value. The heads of a layer compete for its capacity, as in AdaKV.

    `online` statistics are from the segment's own queries. `calibrated` statistics are from other prompts (the paper's
    variant with statistics). In next-scale models each scale then has the mean of its own rotated queries, and all
    scales share a covariance about these means, so that no rotation is averaged.

    Differs from the paper in: eviction happens once per segment. Competing heads are inferred for all of the paper's
    results (`heads=even` is the alternative). During an answer the paper uses the queries of the last 128 steps; its
    program counts future positions from the length of that buffer and drops its first four queries. Here the queries
    are the segment's, at their true positions. The paper has 512 future positions; here they end with the generation,
    and in next-scale models they are the next scale's. Calibrated query heads of a KV head are pooled, with the divisor
    n.

    Attributes:
        statistics: see above.
        covariance: `full`, `diagonal` or `none`.
        norm: norm of a slot's `value`, of its `output` through W_o (the paper's Eq. 9), or `none`.
        epsilon: added to attention before the norm; 0.02 in the paper, 0 in its needle tests.
        horizon: with calibrated scales, the `next` scale, or `all` later scales, weighted by tokens.
        future: number of positions over which rotations are averaged.
        queries: number of a segment's newest queries for online statistics; None for all.
        heads: `compete`, or `even` shares.
    """

    statistics: Literal["online", "calibrated"] = "online"
    covariance: Literal["full", "diagonal", "none"] = "full"
    norm: Literal["value", "output", "none"] = "value"
    epsilon: float = 0.02
    horizon: Literal["next", "all"] = "next"
    future: int = 512
    queries: int | None = None
    heads: Literal["compete", "even"] = "compete"

    recordable: ClassVar[bool] = True
    revision: ClassVar[int] = 2  # before, no slot was safe at fewer than five tokens a head
    limits = set_limits(
        epsilon=Limit(0), future=Limit(1), queries=Limit(1, wants="must be at least 1, or null for all")
    )

    @property
    def competes(self) -> bool:
        """Whether the heads of a layer compete for its capacity."""
        return self.heads == "compete"

    @property
    def uses_value_norms(self) -> bool:
        """Whether scores contain the norm of values."""
        return self.norm != "none"

    def needs(self) -> Observer | None:
        """Return the calibration of queries, if statistics are calibrated."""
        return QueryGaussians() if self.statistics == "calibrated" else None

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Compute the covariances of queries from the calibrated moments."""
        super().prepare(spec, budget, artifact)
        if self.statistics == "online":
            return
        tensors = require_artifact(artifact, "method=expected_attention:")
        weights = torch.tensor(weigh_segments(spec), dtype=torch.float64)
        mean, weights = tensors["mean"], weights / weights.sum()
        if spec.family == "next-token":
            mean = (mean * weights[:, None]).sum(2, keepdim=True).expand_as(mean)
        means = torch.einsum("k,lhkc,lhkd->lhcd", weights, mean, mean)
        self._mean, self._covariance = mean.float(), (tensors["moment"] - means).float()

    def score(self, view: View) -> Tensor:
        """Return expected attention times norms, infinity for the first tokens: float32 [rows, slots]."""
        leads = find_leading(view, self.leading)
        unseen = (leads | (view.position < 0))[:, None]
        attention = sum(
            share * softmax_seen(logits.masked_fill(unseen, -torch.inf)).mean(1)
            for share, logits in self._expect(view)
        )
        assert isinstance(attention, Tensor)
        if self.norm == "value":
            attention = (attention + self.epsilon) * view.value_norms()
        elif self.norm == "output":
            attention = (attention + self.epsilon) * measure_output(view, 2)
        return attention.masked_fill(leads, torch.inf)

    def _expect(self, view: View) -> list[tuple[float, Tensor]]:
        """Return expected logits of future queries [rows, query heads per KV head, slots], each with its weight."""
        later = self.spec.segments[view.segment.index + 1 :] or [view.segment]
        keys = view.cached_keys()
        if self.statistics == "calibrated" and self.spec.family == "next-scale":
            later = later if self.horizon == "all" else later[:1]
            tokens = sum(segment.length for segment in later)
            covariance = self._limit(self._repeat(self._covariance[view.layer], view))
            means = [self._repeat(self._mean[view.layer, :, segment.index], view) for segment in later]
            logits = [expect_logits(keys, mean, covariance) for mean in means]
            return [(s.length / tokens, scale) for s, scale in zip(later, logits, strict=True)]
        mean, covariance = self._fit(view)
        rotation = average_rotation(view, self.spec, self.future)
        if rotation is not None:
            keys = split_even_odd(keys)
            mean, covariance = rotate_gaussian(mean, covariance, rotation)
        return [(1.0, expect_logits(keys, mean, self._limit(covariance)))]

    def _fit(self, view: View) -> tuple[Tensor, Tensor]:
        """Return mean [rows, query heads, D] and covariance [rows, query heads, D, D] of queries before rotation."""
        if self.statistics == "calibrated":
            moments = self._mean[view.layer, :, 0], self._covariance[view.layer]
            return self._repeat(moments[0], view), self._repeat(moments[1], view)
        return fit_gaussian(*read_queries(view, self.spec, self.leading, self.queries))

    def _limit(self, covariance: Tensor) -> Tensor | None:
        if self.covariance == "diagonal":
            return torch.diag_embed(covariance.diagonal(dim1=-2, dim2=-1))
        return None if self.covariance == "none" else covariance

    def _repeat(self, by_head: Tensor, view: View) -> Tensor:
        """Repeat a value of each head [heads, ...] for each row: [rows, 1, ...]."""
        rows = by_head.to(view.position.device, non_blocking=True).unsqueeze(1)
        return rows.repeat(view.sequences, *(1,) * (rows.dim() - 1))
