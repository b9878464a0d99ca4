"""LOOK-M, MergingPress, CaM and D2O: slots that another method evicts are merged into the slots that it keeps."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.config import ConfigError
from kvbench.core.segments import Family, ModelSpec
from kvbench.methods.merging.merge import (
    How,
    Pairs,
    add_values,
    measure_probabilities,
    merge_slots,
    merge_values,
    pair_slots,
    restore_lengths,
    select_ranks,
)
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.draws import DRAWN_ON_HOST, draw_by_row
from kvbench.methods.shared.limits import SHARE, Limit, set_limits
from kvbench.methods.shared.select import choose_best, find_begin
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View
from kvbench.methods.shared.wrapper import Wrapper


@dataclass(kw_only=True)
class Merger(Wrapper):
    """Keep the base's slots and merge the contents of evicted slots into them; a subclass writes `merge`.

    Nothing else is stored, and slots have no bias: a slot that represents several counts once in the softmax.
    """

    @property
    def uses(self) -> Uses:
        """The base's uses, with replaced contents of slots."""
        return replace(self.base.uses, replaces=True)

    def merge(self, view: View, stays: Tensor, leaves: Tensor, ranked: Tensor) -> None:
        """Replace the contents of kept slots.

        Kept slots (`stays`) and evicted slots (`leaves`) are bool [rows, slots], the base's ranking is [rows, slots].
        """
        raise NotImplementedError

    def select_slots(self, view: View, ranked: Tensor) -> Tensor:
        """Select the base's slots, bool [rows, slots], and merge the rest into them."""
        exists = view.position >= 0
        stays = super().select_slots(view, ranked) & exists
        self.merge(view, stays, exists & ~stays, ranked)
        return stays


@dataclass
class LookM(Merger):
    """Merge keys and values of evicted slots into the slots of most similar keys (LOOK-M, arXiv:2406.18139).

    The base, H2O in the paper, selects the kept slots. Each evicted slot merges into the kept slot, including windows
    and sinks, whose key has the largest cosine similarity. Merged slots can be evicted and merge again.

    Differs from the paper in: merging follows each segment instead of the prompt only. The paper's text prior, which
    keeps all text of a prompt, is `method.base.sinks=1` in a next-token model, whose first segment is the condition; a
    budget too small for the condition is refused. The release keeps the first four tokens of a prompt without images,
    filters the sources of `average` and `weighted` (`filter=rank_mean`), and with `average` then merges the first
    evicted slots instead of the filtered slots (`official_sources`). Attention of query heads that share a KV head is
    averaged. An average of rotated keys has no position, and an average of normalised keys is shorter than a key
    (`keys=keep`, `renormalise` and `similarity=unrotated` are kvbench's options).

    Attributes:
        how: `pivot` averages each token with its target first, `average` and `weighted` are the paper's other rules,
            `normalised` is KVCache-Factory's; `none` merges nothing (`merge.How`).
        keys: `merge` keys like values, or `keep` the targets' keys.
        similarity: compare keys as stored, `rotated`, or `unrotated`.
        renormalise: scale a merged key to the norm of the target's key.
        filter: `none`; or `rank_mean`, merge the i-th evicted slots of all heads if their mean similarity reaches the
            overall mean.
        official_sources: with the filter and `average`, merge the first evicted slots.
    """

    how: How = "pivot"
    keys: Literal["merge", "keep"] = "merge"
    similarity: Literal["rotated", "unrotated"] = "rotated"
    renormalise: bool = False
    filter: Literal["none", "rank_mean"] = "none"
    official_sources: bool = False

    recordable: ClassVar[bool] = True

    @property
    def uses(self) -> Uses:
        """The base's uses, with replaced contents of slots unless `how` is `none`."""
        return replace(self.base.uses, replaces=self.how != "none")

    @property
    def heads_independent(self) -> bool:
        """Whether the base's heads are independent and no filter compares them."""
        return super().heads_independent and self.filter == "none"

    def merge(self, view: View, stays: Tensor, leaves: Tensor, ranked: Tensor) -> None:
        """Merge keys and values into the most similar kept slot."""
        if self.how == "none":
            return
        keys = view.cached_keys()
        compared = keys if self.similarity == "rotated" else view.cached_keys(rotated=False)
        pairs = pair_slots(compared, leaves, stays)
        merges = self.select_merges(view, pairs)
        merged, values = merge_slots(
            keys, view.cached_values(), pairs, merges, self.how, first_sources=self.official_sources
        )
        if self.keys == "keep":
            merged = keys
        elif self.renormalise:
            merged = restore_lengths(merged, keys)
        view.replace(merged, values)

    def select_merges(self, view: View, pairs: Pairs) -> Tensor:
        """Select the evicted slots that merge, bool [rows, slots]."""
        return pairs.leaves if self.filter == "none" else select_ranks(pairs, view.heads)[0]


@dataclass
class D2O(LookM):
    """Merge evicted slots above a moving threshold of similarity (D2O, arXiv:2406.13035).

    At the first eviction, the threshold is the mean similarity of the evicted slots; later it is
    alpha x threshold + beta x mean. The i-th evicted slots of all heads merge if their mean similarity reaches it.

    Differs from the program in: eviction happens once per segment instead of once per token; each layer and sequence
    has its own threshold. Next-scale models are not supported: a whole scale can be evicted at once, and any such
    threshold would merge about half of it. `method.base=meda/variance` has the program's layer shares.

    Attributes:
        alpha: weight of the previous threshold.
        beta: weight of the current mean.
    """

    how: How = "weighted"
    alpha: float = 0.5
    beta: float = 0.5
    _thresholds: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    recordable: ClassVar[bool] = False  # thresholds are kept on the host between calls
    families: ClassVar[tuple[Family, ...]] = ("next-token",)
    limits = set_limits(alpha=SHARE, beta=SHARE)
    heads_independent = False  # heads share a threshold

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Prepare the base and reset the thresholds of all layers."""
        super().prepare(spec, budget, artifact)
        self._thresholds.clear()

    def ranked_if_full(self, view: View) -> Tensor | None:
        """Reset the layer's thresholds at the start of a generation, and return the base's ranking."""
        if view.segment.index == 0:
            self._thresholds.pop(view.layer, None)
        return super().ranked_if_full(view)

    def select_merges(self, view: View, pairs: Pairs) -> Tensor:
        """Update the thresholds, and select the slots that reach them, bool [rows, slots]."""
        merges, mean = select_ranks(pairs, view.heads)
        known = self._thresholds.get(view.layer, torch.full_like(mean, torch.nan))
        moved = torch.where(known.isnan(), mean, self.alpha * known + self.beta * mean)
        threshold = torch.where(pairs.leaves.unflatten(0, (-1, view.heads)).any((1, 2)), moved, known)
        self._thresholds[view.layer] = threshold
        later, _ = select_ranks(pairs, view.heads, threshold)
        # At the first eviction the mean is the threshold; `merges` is exact despite rounding.
        return torch.where(known.isnan().repeat_interleave(view.heads)[:, None], merges, later)


@dataclass
class MergingPress(Merger):
    """Merge values, but not keys, of evicted slots into the slots of most similar keys (kvpress's MergingPress).

    The weight of a value is its similarity times its share of both values' norms.

    Differs from the program in: eviction happens once per segment; a `fraction` counts all evicted slots, including
    slots below the threshold (`official_quantile` is the program's rule, which merges nothing in a row whose quantile
    is undefined).

    Attributes:
        threshold: minimum cosine similarity of slots that merge.
        fraction: share of the evicted slots that merge, the most similar first.
        official_quantile: see above.
    """

    threshold: float = 0.0
    fraction: float = 1.0
    official_quantile: bool = False

    recordable: ClassVar[bool] = True
    limits = set_limits(threshold=Limit(-1, 1, "is a cosine and must lie in -1..1"), fraction=SHARE)

    def merge(self, view: View, stays: Tensor, leaves: Tensor, ranked: Tensor) -> None:
        """Merge evicted values into the kept slot with the most similar key."""
        keys, rule = view.cached_keys(), (self.threshold, self.fraction, self.official_quantile)
        values = merge_values(view.cached_values(), pair_slots(keys, leaves, stays), *rule)
        view.replace(keys, values)


@dataclass
class CaM(Merger):
    """Add evicted values at random to the values of the next kept slots (CaM, ICML 2024; kvpress's CAMPress).

    The probability that an evicted slot merges is its accumulated attention divided by the mean attention of its
    targets, at most 1. The targets are the next `merge_budget` kept slots; each gets an equal part of the value. Keys
    do not change. Only the best evicted slots can merge, as many as the segment has tokens; other slots are dropped.

    Differs from the program in: eviction happens once per segment; heads keep the base's tokens, the same in all heads
    only with a base like `tova`; draws depend only on the prompt, the layer and the segment. Attention of a prompt's
    own queries does not count, as in the program. In next-scale models nearly all evicted slots merge, and sums of
    hundreds of values dominate other values (`normalise`): experimental there.

    Attributes:
        merge_budget: number of targets of a value.
        attention: `cumulative`, since a slot was cached, or `newest`, from the segment's last query (the authors').
        sample: `bernoulli` draws; `expected` weights each value by its probability.
        normalise: divide a value by 1 plus the added weights; the program does not.
        seed: seed of the draws.
    """

    merge_budget: int = 32
    attention: Literal["cumulative", "newest"] = "cumulative"
    sample: Literal["bernoulli", "expected"] = "bernoulli"
    normalise: bool = False
    seed: int = 0

    recordable: ClassVar[bool] = True
    revision: ClassVar[int] = 1  # before, draws depended on the padding in front of a prompt
    limits = set_limits(merge_budget=Limit(1))

    @property
    def graph_obstacle(self) -> str | None:
        """Random draws differ between prompts; a recording would repeat the first."""
        drawn = DRAWN_ON_HOST if self.sample == "bernoulli" else None
        return drawn or super().graph_obstacle

    @property
    def uses(self) -> Uses:
        """The base's uses, with replaced contents of slots and a state of accumulated attention."""
        return replace(super().uses, state=1)

    def __post_init__(self) -> None:
        """Refuse a base that has a state, because cam has a state of its own (ConfigError)."""
        super().__post_init__()
        if self.base.uses.state:
            raise ConfigError(
                f"method.base: {type(self.base).__name__} keeps values per slot, and so does cam; choose another "
                "base, without method.base.refresh and method.base.ema"
            )

    def ranked_if_full(self, view: View) -> Tensor | None:
        """Add the segment's attention to each slot's sum, and return the base's ranking."""
        if self.spec.family == "next-scale" or view.segment.index:
            if self.attention == "cumulative":
                view.state += view.mass() * view.segment.length
            else:
                view.state.copy_(view.mass(torch.tensor([view.segment.length - 1])))
        return super().ranked_if_full(view)

    def merge(self, view: View, stays: Tensor, leaves: Tensor, ranked: Tensor) -> None:
        """Draw the evicted slots that merge, and add their values."""
        leaving = ranked.masked_fill(~leaves, -torch.inf)
        merges = leaves & choose_best(leaving.flip(1), view.segment.length).flip(1)
        weight = measure_probabilities(view.state, merges, stays, self.merge_budget)
        if self.sample == "bernoulli":
            draws = draw_by_row(self.seed, view, self.spec, view.segment.end)
            token = (view.position - find_begin(view)).clamp(min=0)
            weight = (draws.gather(1, token) < weight).float()
        values = add_values(view.cached_values(), weight, stays, self.merge_budget, normalise=self.normalise)
        view.replace(view.cached_keys(), values)
