"""AMS-KV: condensed and local scales, with more capacity in layers whose keys change between scales (AAAI 2026)."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.budget import Budget, InfeasibleBudget
from kvbench.core.segments import Family, ModelSpec, Segment
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact, Observer, require_artifact
from kvbench.methods.shared.capacities import share_by_head
from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View

Metric = Literal["neg_mse", "neg_l2_per_token", "neg_l2"]
Resize = Literal["bilinear", "bicubic", "nearest"]


def compare_keys(
    k: Tensor, before: Tensor, segment: Segment, earlier: Segment, metric: Metric, resize: Resize
) -> Tensor:
    """Return the similarity S of a scale's keys to the previous scale's, resized to its map, float32 [rows] (Eq. 3).

    The keys are `k` [rows, segment.length, D] and `before` [rows, earlier.length, D]. The paper writes a negative L2
    norm; its thresholds around -0.008 fit the mean squared difference over tokens and channels (`neg_mse`), not a norm
    over the map (`neg_l2`) or over each token's channels. It calls the interpolation, `resize`, two-dimensional.
    """
    maps = before.float().transpose(1, 2).unflatten(2, (earlier.height, earlier.width))
    aligned = {} if resize == "nearest" else {"align_corners": False}
    resized = F.interpolate(maps, (segment.height, segment.width), mode=resize, **aligned)
    difference = k.float() - resized.flatten(2).transpose(1, 2)
    if metric == "neg_mse":
        return -difference.square().mean((1, 2))
    if metric == "neg_l2_per_token":
        return -difference.norm(dim=-1).mean(1)
    return -difference.flatten(1).norm(dim=1)


@dataclass
class KeySimilarity(Observer):
    """Calibration of S [L, K]: `compare_keys` per layer and scale, averaged over rows; 0 at scale 0."""

    metric: Metric = "neg_mse"
    resize: Resize = "bilinear"

    kind: ClassVar[str] = "key_similarity"
    uses = Uses(previous_keys=True)

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shape [L, K] of `similarity`."""
        return {"similarity": (spec.layers, len(spec.segments))}

    def accumulate(self, view: View) -> None:
        """Add the segment's mean similarity over rows."""
        segment = view.segment
        if segment.index:
            earlier = self.spec.segments[segment.index - 1]
            rows = compare_keys(view.keys(), view.previous_keys(), segment, earlier, self.metric, self.resize)
            self.sums["similarity"][view.layer, segment.index] += rows.double().mean().cpu() * (
                view.sequences // self.spec.branches
            )


@dataclass(kw_only=True)
class Condensed(Method):
    """Keep the condensed scales, and as many of the newest other tokens as fit.

    Attributes:
        condensed: leading scales that are always kept.
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
        """Refuse condensed scales that leave fewer than two other cached scales."""
        super().check(spec, budget)
        if not 0 <= self.condensed <= len(spec.segments) - 3:
            raise ValueError(
                f"method.condensed={self.condensed}: must lie in 0..{len(spec.segments) - 3} for {spec.name}"
            )

    def evict(self, view: View, capacity: Tensor) -> Tensor:
        """Keep condensed and newest tokens up to a capacity, int64 [rows] (Algorithm 1, lines 5, 9, 13 to 16)."""
        exists = view.position >= 0
        current = view.position >= view.segment.start
        fits = view.segment.length <= capacity[:, None]
        overflows = (count_held(view) > capacity)[:, None]
        age = exists.flip(1).cumsum(1).flip(1)  # number of slots from this slot to the newest
        if self.granularity == "scale":
            source = view.segment_ids.clamp(min=0)
            by_scale = age.new_zeros(len(age), view.segment.index + 1)
            age = by_scale.scatter_reduce(1, source, age * exists, "amax").gather(1, source)
        condensed = self.spec.leading_tokens(self.condensed)
        stays = (view.position < condensed) | (age <= capacity[:, None] - condensed)
        return exists & torch.where(overflows, torch.where(fits, stays, ~current), True)


@dataclass
class AMSKV(Condensed):
    """Keep condensed and newest scales up to C_min in each layer, or up to C_max once the layer's keys change much.

    This is Algorithm 1 with CLRU eviction (Algorithm 2). Each layer starts with C_min. If it overflows while S (Eq. 3)
    is below theta, it becomes cache-demanding permanently and gets C_max. A scale larger than the capacity is not
    cached. The cache size depends on the input, so the budget is not enforced and the peak is measured
    (arXiv:2511.16047).

    Differs from the paper in: capacities follow from the last two scales that are read, because the last scale is never
    read (the literal reading contradicts the published savings); the two branches of a prompt decide together, so that
    the batch does not matter. Metric, interpolation and granularity are open choices.

    Attributes:
        theta: threshold on S, specific to a model and a metric.
        demanding: share of layers that become demanding, instead of theta; theta is then the quantile of each layer's
            lowest calibrated S over the scales that overflow C_min.
        strict: stop when the budget is exceeded.
    """

    theta: float = -0.008
    demanding: float | None = None
    strict: bool = False

    follows_budget: ClassVar[bool] = False
    uses = Uses(previous_keys=True)
    limits = set_limits(demanding=Limit(0, 1, "must lie in 0..1, or null to use theta"))
    graph_obstacle = "the capacities of layers depend on data"

    def needs(self) -> Observer | Path | None:
        """Return the calibration of similarities if it determines theta."""
        return None if self.demanding is None else KeySimilarity(self.metric, self.resize)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Compute capacities and the threshold theta from the calibration."""
        super().prepare(spec, budget, artifact)
        self.first, self.largest = effective_capacities(spec, self.condensed)
        self._demanding: list[Tensor] = [torch.zeros(0)] * spec.layers
        self._theta = self.theta
        if self.demanding is not None:
            similarity = require_artifact(artifact, "method.demanding:")["similarity"]
            overflow = next(k for k, end in enumerate(spec.ends) if end > self.first)
            # A layer can become demanding at any of these scales.
            profile = similarity[:, overflow:-1].min(1).values.sort().values
            count = round(self.demanding * spec.layers)
            # The midpoint to the next layer is robust to rounding; at the ends it is infinite.
            padded = torch.cat((profile.new_tensor([-torch.inf]), profile, profile.new_tensor([torch.inf])))
            self._theta = float(padded[count : count + 2].mean())

    def keep(self, view: View) -> Tensor:
        """Apply Algorithm 1 to the cache and the new scale, bool [rows, slots]; the layer may become demanding."""
        if view.segment.index == 0:
            self._demanding[view.layer] = torch.zeros(
                view.sequences, dtype=torch.bool, device=view.position.device
            )
        demanding = self._demanding[view.layer]
        tokens = count_held(view).view(view.sequences, view.heads)[:, 0]
        undecided = ~demanding & (tokens > self.first)
        if undecided.any() and view.segment.length <= self.largest:
            demanding |= undecided & (self._similarity(view) < self._theta)
        capacity = torch.where(demanding, self.largest, self.first).repeat_interleave(view.heads)
        return self.evict(view, capacity)

    def compares_keys(self, layer: int, segment: Segment) -> bool:
        """Return whether a layer can still become demanding at the next scale."""
        following = self.spec.segments[segment.index + 1]
        return not following.last and following.length <= self.largest

    def _similarity(self, view: View) -> Tensor:
        """Return S of each sequence, averaged over the branches of its prompt: float32 [sequences]."""
        earlier = self.spec.segments[view.segment.index - 1]
        rows = compare_keys(
            view.keys(), view.previous_keys(), view.segment, earlier, self.metric, self.resize
        )
        branches = self.spec.branches
        return rows.view(branches, -1, view.heads).mean((0, 2)).repeat(branches)


@dataclass
class AMSKVFixed(Condensed):
    """AMS-KV at a fixed budget: cache-demanding layers are chosen in advance, as many as fit.

    C_min covers the condensed scales and one more scale, C_max two more: the largest for which C_min <= B / T. The N
    layers of lowest calibrated similarity get C_max, N = floor((B / T - C_min) L / (C_max - C_min)). The next layer in
    this order gets the remainder, which is less than C_max. If all layers have C_max, heads share B evenly. Part of B
    can stay unused: a layer fills C_max only at the scale that needs it, and a scale larger than its layer's capacity
    is not cached, which is most of B at budgets of a few tokens per head.

    Differs from the paper in: the paper has no such variant. Its Table 2 is closest, with both placements of the larger
    caches (`placement`).

    Attributes:
        placement: layers with C_max: `similarity`, the lowest S at the scale that needs it, or `uniform` over depth.
    """

    placement: Literal["similarity", "uniform"] = "similarity"

    static: ClassVar[bool] = True
    revision: ClassVar[int] = 1  # before, the remainder of the budget was unused

    def needs(self) -> Observer | Path | None:
        """Return the calibration of similarities if it determines the placement."""
        return KeySimilarity(self.metric, self.resize) if self.placement == "similarity" else None

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse what `Condensed` refuses, and a budget below the condensed scales plus the first scale."""
        super().check(spec, budget)
        needed = spec.leading_tokens(self.condensed) + spec.lengths[0]
        if budget.per_head < needed:
            raise InfeasibleBudget.of(budget, needed, spec, f"{self.condensed} condensed scales and another")

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Compute capacities: C_max in demanding layers, C_min in other layers, the rest of B in one more layer."""
        super().prepare(spec, budget, artifact)
        if self.placement == "similarity":
            similarity = require_artifact(artifact, "method=ams_kv_fixed:")["similarity"]
        self.scale, first, largest = fixed_capacities(spec, budget, self.condensed)
        number = int((budget.per_head - first) * spec.layers / (largest - first))
        if number >= spec.layers:
            self.capacities = share_by_head(budget.tokens, spec)
            return
        if self.placement == "uniform":
            larger = [int((index + 0.5) * spec.layers / number) for index in range(number)]
            order = larger + [layer for layer in range(spec.layers) if layer not in larger]
        else:
            order = similarity[:, self.scale + 1].sort(stable=True).indices.tolist()
        self.capacities = torch.full((spec.layers, spec.heads), first)
        self.capacities[order[:number]] = largest
        even, more = divmod(budget.tokens - int(self.capacities.sum()), spec.heads)
        self.capacities[order[number]] += even + (torch.arange(spec.heads) < more)

    def keep(self, view: View) -> Tensor:
        """Apply CLRU eviction to the cache and the new scale, bool [rows, slots]."""
        return self.evict(view, self.capacities[view.layer].to(view.position.device))


def count_held(view: View) -> Tensor:
    """Return the number of tokens in each row, int64 [rows], including padding that counts as held."""
    tokens = (view.position >= 0).sum(1)
    return tokens if view.padding_charge is None else tokens + view.padding_charge


def effective_capacities(spec: ModelSpec, condensed: int) -> tuple[int, int]:
    """Return C_min and C_max: tokens of the condensed scales plus the second-to-last cached scale, or the last two."""
    *_, earlier, later = spec.lengths[:-1]
    tokens = spec.leading_tokens(condensed)
    return tokens + earlier, tokens + earlier + later


def fixed_capacities(spec: ModelSpec, budget: Budget, condensed: int) -> tuple[int, int, int]:
    """Return the largest scale for which C_min fits the budget and whose next scale is read, C_min and C_max."""
    tokens, lengths = spec.leading_tokens(condensed), spec.lengths[:-1]
    scale = max(k for k in range(len(lengths) - 1) if k == 0 or tokens + lengths[k] <= budget.per_head)
    return scale, tokens + lengths[scale], tokens + lengths[scale] + lengths[scale + 1]
