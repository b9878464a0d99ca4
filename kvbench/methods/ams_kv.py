"""AMS-KV: condensed and local scales, more of them in layers whose keys change from scale to scale (AAAI 2026)."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.budget import Budget, InfeasibleBudget
from kvbench.core.segments import Family, ModelSpec, Segment
from kvbench.methods.shared.base import Artifact, Limit, Method, Observer, require_artifact, set_limits
from kvbench.methods.shared.capabilities import ComparesKeys
from kvbench.methods.shared.select import share_by_head
from kvbench.methods.shared.view import View

Metric = Literal["neg_mse", "neg_l2_per_token", "neg_l2"]
Resize = Literal["bilinear", "bicubic", "nearest"]


def compare_keys(
    k: Tensor, before: Tensor, segment: Segment, earlier: Segment, metric: Metric, resize: Resize
) -> Tensor:
    """Compare a scale's keys with the previous scale's, resized to its map: S float32 [rows] (AMS-KV Eq. 3).

    Args:
        k: the scale's keys [rows, segment.length, D].
        before: the previous scale's keys [rows, earlier.length, D].
        segment: the scale.
        earlier: the previous scale.
        metric: the paper writes a negative L2 norm; its thresholds around -0.008 fit a mean over tokens and channels of
            the squared difference (`neg_mse`), not a norm over the map (`neg_l2`) or over each token's channels.
        resize: the paper says two-dimensional interpolation.
    """
    maps = before.float().transpose(1, 2).unflatten(2, (earlier.height, earlier.width))
    aligned = {} if resize == "nearest" else {"align_corners": False}
    resized = F.interpolate(maps, (segment.height, segment.width), mode=resize, **aligned)
    difference = k.float() - resized.flatten(2).transpose(1, 2)
    if metric == "neg_mse":
        return -difference.square().mean((1, 2))
    return (
        -difference.norm(dim=-1).mean(1)
        if metric == "neg_l2_per_token"
        else -difference.flatten(1).norm(dim=1)
    )


@dataclass
class KeySimilarity(ComparesKeys, Observer):
    """Calibrates S [L, K]: what `compare_keys` finds at every layer and scale, mean over all rows; 0 at scale 0."""

    metric: Metric = "neg_mse"
    resize: Resize = "bilinear"

    kind: ClassVar[str] = "key_similarity"

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return [L, K] of `similarity`."""
        return {"similarity": (spec.layers, len(spec.segments))}

    def accumulate(self, view: View) -> None:
        """Add the segment's similarity, a mean over rows."""
        segment = view.segment
        if segment.index:
            earlier = self.spec.segments[segment.index - 1]
            rows = compare_keys(view.keys(), view.previous_keys(), segment, earlier, self.metric, self.resize)
            self.sums["similarity"][view.layer, segment.index] += rows.double().mean().cpu() * (
                view.sequences // self.spec.branches
            )


@dataclass(kw_only=True)
class Condensed(Method):
    """Condensed scales that stay, and the newest others that fit.

    Attributes:
        condensed: leading scales that stay.
        metric: how `compare_keys` measures similarity.
        resize: how `compare_keys` resizes maps.
        granularity: evict the oldest tokens (Algorithm 2) or whole scales.
    """

    condensed: int = 2
    metric: Metric = "neg_mse"
    resize: Resize = "bilinear"
    granularity: Literal["token", "scale"] = "token"

    families: ClassVar[tuple[Family, ...]] = ("next-scale",)

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse condensed scales that leave no two others."""
        super().check(spec, budget)
        if not 0 <= self.condensed <= len(spec.segments) - 3:
            raise ValueError(
                f"method.condensed={self.condensed}: must lie in 0..{len(spec.segments) - 3} for {spec.name}"
            )

    def observe(self) -> KeySimilarity:
        """Return the calibration of similarities."""
        return KeySimilarity(self.metric, self.resize)

    def evict(self, view: View, capacity: Tensor) -> Tensor:
        """Keep condensed and newest tokens up to capacities, int64 [rows] (Algorithm 1's lines 5, 9, 13 to 16)."""
        exists = view.position >= 0
        current = view.position >= view.segment.start
        fits = view.segment.length <= capacity[:, None]
        overflows = (count_held(view) > capacity)[:, None]
        newer = exists.flip(1).cumsum(1).flip(1)  # slots from this one to the newest
        if self.granularity == "scale":
            source = view.segment_ids.clamp(min=0)
            of_source = newer.new_zeros(len(newer), view.segment.index + 1)
            newer = of_source.scatter_reduce(1, source, newer * exists, "amax").gather(1, source)
        condensed = self.spec.leading_tokens(self.condensed)
        kept = (view.position < condensed) | (newer <= capacity[:, None] - condensed)
        return exists & torch.where(overflows, torch.where(fits, kept, ~current), True)


@dataclass
class AMSKV(ComparesKeys, Condensed):
    """Per layer the condensed scales and the newest that fit C_min, or C_max once the layer's keys change much.

    Algorithm 1 and its CLRU eviction (Algorithm 2): a layer starts with C_min; when it overflows and S (Eq. 3) lies
    below theta it becomes cache-demanding for good and has C_max; a scale larger than the capacity is not cached. What
    it holds depends on the input, so the budget is not enforced: the measured peak is what counts (arXiv:2511.16047).

    Differs from the paper in: capacities are those of the last two scales that are ever read, since the last one never
    is (the literal reading contradicts the published savings); a prompt's two branches decide together, so that batches
    change nothing. Metric, interpolation and granularity are open choices.

    Attributes:
        theta: threshold on S; it belongs to a model and a metric.
        demanding: in place of theta, the share of layers to become demanding; theta is then the quantile of the
            layers' lowest calibrated S over the scales that overflow C_min.
        strict: true to stop when the budget is exceeded.
    """

    theta: float = -0.008
    demanding: float | None = None
    strict: bool = False

    limits = set_limits(demanding=Limit(0, 1, "must lie in 0..1, or null to use theta"))

    @property
    def budgeted(self) -> bool:
        """Return whether it stops when the budget is exceeded; what it keeps does not depend on it."""
        return self.strict

    def needs(self) -> Observer | Path | None:
        """Return the calibration of similarities if theta is to come of it."""
        return None if self.demanding is None else self.observe()

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Work out capacities and threshold."""
        super().prepare(spec, budget, artifact)
        self.first, self.largest = effective_capacities(spec, self.condensed)
        self._demanding: list[Tensor] = [torch.zeros(0)] * spec.layers
        self._theta = self.theta
        if self.demanding is not None:
            similarity = require_artifact(artifact, "method.demanding:")["similarity"]
            overflow = next(k for k, end in enumerate(spec.ends) if end > self.first)
            # Any of these scales may promote.
            profile = similarity[:, overflow:-1].min(1).values.sort().values
            count = round(self.demanding * spec.layers)
            # Halfway to the next layer, so that rounding does not decide; everything or nothing at the ends.
            padded = torch.cat((profile.new_tensor([-torch.inf]), profile, profile.new_tensor([torch.inf])))
            self._theta = float(padded[count : count + 2].mean())

    def keep(self, view: View) -> Tensor:
        """Keep what Algorithm 1 leaves of the cache and the new scale; a layer may become demanding."""
        if view.segment.index == 0:
            self._demanding[view.layer] = torch.zeros(
                view.sequences, dtype=torch.bool, device=view.position.device
            )
        demanding = self._demanding[view.layer]
        held = count_held(view).view(view.sequences, view.heads)[:, 0]
        undecided = ~demanding & (held > self.first)
        if undecided.any() and view.segment.length <= self.largest:
            demanding |= undecided & (self._similarity(view) < self._theta)
        capacity = torch.where(demanding, self.largest, self.first).repeat_interleave(view.heads)
        return self.evict(view, capacity)

    def compares(self, layer: int, segment: Segment) -> bool:
        """Return whether layers may still become demanding at the next scale."""
        following = self.spec.segments[segment.index + 1]
        return not following.last and following.length <= self.largest

    def _similarity(self, view: View) -> Tensor:
        """Return S of every sequence, float32 [sequences]; the branches of a prompt have their mean."""
        earlier = self.spec.segments[view.segment.index - 1]
        rows = compare_keys(
            view.keys(), view.previous_keys(), view.segment, earlier, self.metric, self.resize
        )
        branches = self.spec.branches
        return rows.view(branches, -1, view.heads).mean((0, 2)).repeat(branches)


@dataclass
class AMSKVFixed(Condensed):
    """AMS-KV at a given budget: which layers are cache-demanding is decided beforehand, and only as many as fit.

    C_min and C_max are the condensed scales with one and with two more scales, the largest that C_min <= B / T allows;
    the N layers of lowest calibrated similarity have C_max, N = floor((B / T - C_min) L / (C_max - C_min)). The next
    layer in that order has what is left, which is less than C_max; where all have C_max, heads share B evenly. What the
    rule leaves unused stays so: layers with C_max fill them only when that scale comes, and a scale larger than its
    layer's capacity is not cached at all, which at budgets of a few tokens per head is most of B.

    Differs from the paper in: the paper has no such variant; its Table 2 comes closest, whose two placements of the
    larger caches are `placement`.

    Attributes:
        placement: layers with C_max: `similarity`, the lowest S at the scale that needs it, or `uniform` over depth.
    """

    placement: Literal["similarity", "uniform"] = "similarity"

    static: ClassVar[bool] = True
    revision: ClassVar[int] = 1  # what was left of the budget was unused

    def needs(self) -> Observer | Path | None:
        """Return the calibration of similarities if placement follows them."""
        return self.observe() if self.placement == "similarity" else None

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse a budget that the condensed scales and the first one exceed, and too many condensed scales."""
        super().check(spec, budget)
        needed = spec.leading_tokens(self.condensed) + spec.lengths[0]
        if budget.per_head < needed:
            raise InfeasibleBudget.of(budget, needed, spec, f"{self.condensed} condensed scales and another")

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Give every head its capacity."""
        super().prepare(spec, budget, artifact)
        if self.placement == "similarity":
            similarity = require_artifact(artifact, "method=ams_kv_fixed:")["similarity"]
        self.scale, first, largest = fixed_capacities(spec, budget, self.condensed)
        number = int((budget.per_head - first) * spec.layers / (largest - first))
        if number >= spec.layers:
            self.capacities = share_by_head(budget.tokens, spec)
            return
        if self.placement == "uniform":
            larger = [int((place + 0.5) * spec.layers / number) for place in range(number)]
            order = larger + [layer for layer in range(spec.layers) if layer not in larger]
        else:
            order = similarity[:, self.scale + 1].sort(stable=True).indices.tolist()
        self.capacities = torch.full((spec.layers, spec.heads), first)
        self.capacities[order[:number]] = largest
        each, some = divmod(budget.tokens - int(self.capacities.sum()), spec.heads)
        self.capacities[order[number]] += each + (torch.arange(spec.heads) < some)

    def keep(self, view: View) -> Tensor:
        """Keep what CLRU leaves of the cache and the new scale."""
        return self.evict(view, self.capacities[view.layer].to(view.position.device))


def count_held(view: View) -> Tensor:
    """Return the tokens that each row holds, int64 [rows], with the padding that counts as held."""
    held = (view.position >= 0).sum(1)
    return held if view.padding_charge is None else held + view.padding_charge


def effective_capacities(spec: ModelSpec, condensed: int) -> tuple[int, int]:
    """Return C_min and C_max: condensed scales with the last but one that is ever read, and with the last two."""
    *_, earlier, later = spec.lengths[:-1]
    tokens = spec.leading_tokens(condensed)
    return tokens + earlier, tokens + earlier + later


def fixed_capacities(spec: ModelSpec, budget: Budget, condensed: int) -> tuple[int, int, int]:
    """Return the largest scale a whose C_min fits the budget (of those before another that is read), C_min, C_max."""
    tokens, lengths = spec.leading_tokens(condensed), spec.lengths[:-1]
    scale = max(k for k in range(len(lengths) - 1) if k == 0 or tokens + lengths[k] <= budget.per_head)
    return scale, tokens + lengths[scale], tokens + lengths[scale] + lengths[scale + 1]
