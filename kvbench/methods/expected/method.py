"""Expected attention: slots by the attention that queries to come can be expected to pay."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.expected.gaussian import expect_logits, fit_gaussian, turn_gaussian
from kvbench.methods.shared.base import Artifact, Limit, Observer, require_artifact, set_limits
from kvbench.methods.shared.output_norms import measure_output
from kvbench.methods.shared.scored import AdaptiveHeads
from kvbench.methods.shared.select import find_valid_queries, pair_halves, softmax_seen
from kvbench.methods.shared.view import View


@dataclass
class QueryGaussians(Observer):
    """Calibrates a Gaussian of the scaled queries of every KV head, over conditional sequences.

    In next-scale models queries are rotated as they are, and `mean` [L, H, K, D] has one mean a scale; in others they
    are not rotated. `moment` [L, H, D, D] is the second moment of all but the first segment, or in next-scale models of
    all scales, each weighted by its tokens. Query heads that share a KV head are taken together.
    """

    kind: ClassVar[str] = "query_gaussians"

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return [L, H, K, D] of `mean` and [L, H, D, D] of `moment`."""
        shape = spec.layers, spec.heads
        channels = spec.head_dim
        return {"mean": (*shape, len(spec.segments), channels), "moment": (*shape, channels, channels)}

    def accumulate(self, view: View) -> None:
        """Add the segment's queries."""
        scales, k = self.spec.family == "next-scale", view.segment.index
        if not scales and k == 0:
            return  # a prompt's queries, some of them padding, say nothing of those to come
        queries = view.queries(torch.arange(view.segment.length), rotated=scales).double().flatten(1, 2)
        tokens = sum(weigh_segments(self.spec))
        self.sums["mean"][view.layer, :, k] += self.select_conditional(queries.mean(1)).sum(0)
        moment = queries.mT @ queries / queries.shape[1] * (view.segment.length / tokens)
        self.sums["moment"][view.layer] += self.select_conditional(moment).sum(0)


def weigh_segments(spec: ModelSpec) -> list[int]:
    """Return the tokens by which each segment counts in a calibration: none for the prompt of a next-token model."""
    return [0 if spec.family == "next-token" and not s.index else s.length for s in spec.segments]


@dataclass
class ExpectedAttention(AdaptiveHeads):
    """Keep what queries to come are expected to attend to, times the norm of its value (arXiv:2510.00636).

    Queries before rotation are taken as Gaussian, rotated by the mean rotation of the next positions. A slot's score is
    the softmax over slots of ln E exp(q k), the mean of its query heads', plus epsilon, times the norm of its value.
    The heads of a layer compete for its capacity, as in AdaKV.

    `online` statistics are those of the segment's own queries. `calibrated` ones are of other prompts (the paper's
    variant with statistics); for next-scale models each scale has the mean of its own rotated queries, and all scales
    share a covariance about these means, so that no rotation is averaged.

    Differs from the paper in: tokens leave once a segment. That every printed number has competing heads is inferred
    (`heads=even`). While an answer is written the paper has the queries of the last 128 steps, and its program takes
    positions to come from the length of that buffer and drops its first four queries; here they are the segment's, at
    their true positions. The paper has 512 positions to come, here they end with the generation, and of scales they are
    the next one's. Calibrated query heads of one KV head are taken together, with the divisor n.

    Attributes:
        statistics: see above.
        covariance: `full`, `diagonal` or `none`.
        norm: of a slot's `value`, of the `output` it adds through W_o (the paper's Eq. 9), or `none`.
        epsilon: added to attention before the norm; 0.02 in the paper, 0 in its needle tests.
        horizon: with calibrated scales, the `next` one, or `all` to come, by their tokens.
        future: positions that rotations are averaged over.
        queries: newest queries of a segment that online statistics have; None for all.
        leading: first tokens of a prompt that always stay and whose queries do not count, 4 in the paper.
        heads: `compete`, or `even`, as many slots in each.
    """

    statistics: Literal["online", "calibrated"] = "online"
    covariance: Literal["full", "diagonal", "none"] = "full"
    norm: Literal["value", "output", "none"] = "value"
    epsilon: float = 0.02
    horizon: Literal["next", "all"] = "next"
    future: int = 512
    queries: int | None = None
    leading: int = 0
    heads: Literal["compete", "even"] = "compete"

    limits = set_limits(
        epsilon=Limit(0),
        future=Limit(1),
        leading=Limit(0),
        queries=Limit(1, wants="must be at least 1, or null for all"),
    )

    @property
    def competes(self) -> bool:
        """Whether heads do."""
        return self.heads == "compete"

    @property
    def uses_value_norms(self) -> bool:
        """Whether scores contain a norm."""
        return self.norm != "none"

    def needs(self) -> Observer | None:
        """Return the calibration of queries, if statistics are calibrated."""
        return QueryGaussians() if self.statistics == "calibrated" else None

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Turn calibrated moments into covariances."""
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
        """Return expected attention times norms, float32 [rows, slots], infinity for the first tokens."""
        first = self.leading if view.padding is None else self.leading + view.padding[:, None]
        leads = (view.position >= 0) & (view.position < first)
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
        """Return expected logits [rows, query heads per KV head, slots] of the queries to come, each with its share."""
        later = self.spec.segments[view.segment.index + 1 :] or [view.segment]
        keys = view.cached_keys()
        if self.statistics == "calibrated" and self.spec.family == "next-scale":
            later = later if self.horizon == "all" else later[:1]
            tokens = sum(segment.length for segment in later)
            covariance = self._repeat(self._covariance[view.layer], view)
            means = [self._repeat(self._mean[view.layer, :, segment.index], view) for segment in later]
            spread = self._limit(covariance)
            return [
                (s.length / tokens, expect_logits(keys, m, spread)) for s, m in zip(later, means, strict=True)
            ]
        mean, covariance = self._fit(view)
        end = (
            later[0].end
            if self.spec.family == "next-scale"
            else min(later[-1].end, view.segment.end + self.future)
        )
        rotation = view.rotation(torch.arange(min(view.segment.end, end - 1), end))
        if rotation is not None:
            keys = pair_halves(keys)
            mean, covariance = turn_gaussian(mean, covariance, rotation.mean(0))
        return [(1.0, expect_logits(keys, mean, self._limit(covariance)))]

    def _fit(self, view: View) -> tuple[Tensor, Tensor]:
        """Return mean and covariance of queries without rotation, of every row's query heads."""
        if self.statistics == "calibrated":
            return self._repeat(self._mean[view.layer, :, 0], view), self._repeat(
                self._covariance[view.layer], view
            )
        length, prompt = view.segment.length, view.segment.index == 0 and self.spec.family == "next-token"
        dropped = self.leading if prompt else 0
        first = min(max(length - (self.queries or length), dropped), length - 1)
        chosen = torch.arange(first, length)
        asking = find_valid_queries(view, chosen if view.padding is None else chosen - dropped)
        return fit_gaussian(view.queries(chosen, rotated=False), None if asking is None else asking[:, None])

    def _limit(self, covariance: Tensor) -> Tensor | None:
        if self.covariance == "none":
            return None
        return (
            torch.diag_embed(covariance.diagonal(dim1=-2, dim2=-1))
            if self.covariance == "diagonal"
            else covariance
        )

    def _repeat(self, by_head: Tensor, view: View) -> Tensor:
        """Return a value of each head [heads, ...] for every row, [rows, 1, ...]."""
        rows = by_head.to(view.position.device, non_blocking=True).unsqueeze(1)
        return rows.repeat(view.sequences, *(1,) * (rows.dim() - 1))
