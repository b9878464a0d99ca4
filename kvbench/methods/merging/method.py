"""LOOK-M, MergingPress, CaM and D2O: what another method lets go is merged into what it keeps."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.config import ConfigError
from kvbench.core.segments import Family, ModelSpec
from kvbench.methods.merging.cam import add_values, measure_probabilities
from kvbench.methods.merging.merge import (
    How,
    Pairs,
    merge_slots,
    merge_values,
    pair_slots,
    restore_lengths,
    select_ranks,
)
from kvbench.methods.shared.base import SHARE, Artifact, Limit, set_limits
from kvbench.methods.shared.capabilities import ReplacesContents, is_stateful
from kvbench.methods.shared.select import choose_best, draw_uniform
from kvbench.methods.shared.view import View
from kvbench.methods.shared.wrapper import Wrapper


@dataclass(kw_only=True)
class Merger(ReplacesContents, Wrapper):
    """Keep what the base keeps, with the contents of what leaves merged into it; a subclass writes `merge`.

    Nothing is stored beside the slots that stay, and none has a bias: a slot that stands for many counts once in the
    softmax.
    """

    def merge(self, view: View, stays: Tensor, leaves: Tensor, ranked: Tensor) -> None:
        """Replace the contents of the slots that stay.

        Args:
            view: the layer.
            stays: bool [rows, slots].
            leaves: bool [rows, slots].
            ranked: [rows, slots], by which the base chose.
        """
        raise NotImplementedError

    def choose(self, view: View, ranked: Tensor) -> Tensor:
        """Choose what the base would, and merge the rest into it."""
        exists = view.position >= 0
        kept = super().choose(view, ranked) & exists
        if self.replaces:
            self.merge(view, kept, exists & ~kept, ranked)
        return kept


@dataclass
class LookM(Merger):
    """Merge keys and values of what leaves into the slots of most similar keys (LOOK-M, arXiv:2406.18139).

    The base, H2O in the paper, decides what stays; each slot that leaves goes into the kept one whose key has the
    largest cosine with its own, windows and sinks among them. In repeated eviction merged slots merge on.

    Differs from the paper in: it is done once a segment instead of once behind a prompt. The paper's text prior, which
    keeps all text of a prompt, is `method.base.sinks=1` of a next-token model, whose first segment is the condition; a
    budget too small for the condition is refused. The release keeps the first four tokens of a prompt without images,
    filters what it merges by `average` and `weighted` (`filter=rank_mean`), and then merges by `average` the first
    slots that leave in place of those that passed (`official_sources`). Attention of query heads that share a
    KV head is averaged. Averages of rotated keys have no position, and those of normalised keys are shorter than keys
    are (`keys=keep`, `renormalise`, `similarity=unrotated` are ours).

    Attributes:
        how: `pivot` averages each token with its target first, `average` and `weighted` are the paper's other two,
            `normalised` is KVCache-Factory's; `none` merges nothing (`merge.How`).
        keys: `merge` them as values, or `keep` those of the targets.
        similarity: of keys as they are stored, rotated, or `unrotated`.
        renormalise: scale a merged key to the length that the target's had.
        filter: `none`; or `rank_mean`, merge the i-th slots that leave of all heads if their mean similarity reaches
            the mean of all.
        official_sources: with the filter and `average`, merge the first slots that leave.
    """

    how: How = "pivot"
    keys: Literal["merge", "keep"] = "merge"
    similarity: Literal["rotated", "unrotated"] = "rotated"
    renormalise: bool = False
    filter: Literal["none", "rank_mean"] = "none"
    official_sources: bool = False

    @property
    def replaces(self) -> bool:
        """Whether anything is merged."""
        return self.how != "none"

    @property
    def heads_independent(self) -> bool:
        """The filter compares heads."""
        return super().heads_independent and self.filter == "none"

    def merge(self, view: View, stays: Tensor, leaves: Tensor, ranked: Tensor) -> None:
        """Merge keys and values into the most similar slot."""
        keys = view.cached_keys()
        compared = keys if self.similarity == "rotated" else view.cached_keys(rotated=False)
        pairs = pair_slots(compared, leaves, stays)
        merges = self.select(view, pairs)
        merged, values = merge_slots(
            keys, view.cached_values(), pairs, merges, self.how, first_sources=self.official_sources
        )
        if self.keys == "keep":
            merged = keys
        elif self.renormalise:
            merged = restore_lengths(merged, keys)
        view.replace(merged, values)

    def select(self, view: View, pairs: Pairs) -> Tensor:
        """Select what merges among what leaves, bool [rows, slots]."""
        return pairs.leaves if self.filter == "none" else select_ranks(pairs, view.heads)[0]


@dataclass
class D2O(LookM):
    """Merge what is similar enough, by a threshold that moves with what left before (D2O, arXiv:2406.13035).

    The first time that anything leaves, the threshold is the mean similarity of what leaves; later it is
    alpha x threshold + beta x mean. The i-th slots that leave of all heads merge if their mean similarity reaches it.

    Differs from the program in: tokens leave once a segment instead of one at a time; a threshold is of one layer and
    sequence. Next-scale models, of which one scale may lose all at once, would be merged in half by any threshold of
    this kind. The program's layer shares are those of `method.base=meda/variance`.

    Attributes:
        alpha: weight of the threshold so far.
        beta: weight of the present mean.
    """

    how: How = "weighted"
    alpha: float = 0.5
    beta: float = 0.5
    _thresholds: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    families: ClassVar[tuple[Family, ...]] = ("next-token",)
    limits = set_limits(alpha=SHARE, beta=SHARE)

    @property
    def heads_independent(self) -> bool:
        """Heads share a threshold."""
        return False

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Set up the base and forget every threshold."""
        super().prepare(spec, budget, artifact)
        self._thresholds.clear()

    def observe(self, view: View) -> None:
        """Forget the thresholds of the generations before."""
        if view.segment.index == 0:
            self._thresholds.pop(view.layer, None)
        super().observe(view)

    def select(self, view: View, pairs: Pairs) -> Tensor:
        """Move the thresholds, and select what reaches them."""
        merges, mean = select_ranks(pairs, view.heads)
        known = self._thresholds.get(view.layer, torch.full_like(mean, torch.nan))
        moved = torch.where(known.isnan(), mean, self.alpha * known + self.beta * mean)
        threshold = torch.where(pairs.leaves.unflatten(0, (-1, view.heads)).any((1, 2)), moved, known)
        self._thresholds[view.layer] = threshold
        later, _ = select_ranks(pairs, view.heads, threshold)
        # The mean of a sequence reaches itself, whatever rounding says.
        return torch.where(known.isnan().repeat_interleave(view.heads)[:, None], merges, later)


@dataclass
class MergingPress(Merger):
    """Merge values, not keys, of what leaves into the slots of most similar keys (kvpress's MergingPress).

    A value weighs its similarity times its share of both values' norms.

    Differs from the program in: tokens leave once a segment; with a `fraction` the most similar of what leaves merge,
    whatever else fails the threshold (`official_quantile` is the program, which merges nothing of a row whose quantile
    is undefined).

    Attributes:
        threshold: least cosine similarity of what merges.
        fraction: of what leaves, the most similar that merge.
        official_quantile: see above.
    """

    threshold: float = 0.0
    fraction: float = 1.0
    official_quantile: bool = False

    limits = set_limits(threshold=Limit(-1, 1, "is a cosine and must lie in -1..1"), fraction=SHARE)

    def merge(self, view: View, stays: Tensor, leaves: Tensor, ranked: Tensor) -> None:
        """Merge values into the most similar slot."""
        keys, rule = view.cached_keys(), (self.threshold, self.fraction, self.official_quantile)
        values = merge_values(view.cached_values(), pair_slots(keys, leaves, stays), *rule)
        view.replace(keys, values)


@dataclass
class CaM(Merger):
    """Add values of what leaves to those of the next slots that stay, at random (CaM, ICML 2024; kvpress's CAMPress).

    A slot that leaves is merged with a probability, its accumulated attention over the mean of the slots it would go
    into, at most 1. These are the next `merge_budget` that stay, each of which gets an equal part of its value. Keys
    stay. Of what leaves, as many tokens as the segment has, those of best score, may merge; others are dropped.

    Differs from the program in: tokens leave once a segment; heads keep what the base keeps, the same tokens only where
    it does that (`tova`); draws depend on the prompt, the layer and the segment alone. Attention of a prompt's own
    queries does not count, as in the program. In a next-scale model nearly all that leaves merges, and sums of hundreds
    of values swamp others (`normalise`): experimental there.

    Attributes:
        merge_budget: slots that a value is spread over.
        attention: `cumulative`, since a slot was cached, or `newest`, of the segment's last query (the authors').
        sample: `bernoulli` draws; `expected` merges a part as large as the probability.
        normalise: divide a value by 1 and the weights that were added to it; the program does not.
        seed: of the draws.
    """

    merge_budget: int = 32
    attention: Literal["cumulative", "newest"] = "cumulative"
    sample: Literal["bernoulli", "expected"] = "bernoulli"
    normalise: bool = False
    seed: int = 0

    limits = set_limits(merge_budget=Limit(1))

    @property
    def stateful(self) -> bool:
        """Accumulated attention is kept per slot."""
        return True

    def __post_init__(self) -> None:
        """Refuse a base that keeps a number per slot, of which there is one.

        Raises:
            ConfigError: it does.
        """
        super().__post_init__()
        if is_stateful(self.base):
            raise ConfigError(
                f"method.base: {type(self.base).__name__} keeps a number per slot, and so does cam; choose another "
                "base, without method.base.refresh and method.base.ema"
            )

    def observe(self, view: View) -> None:
        """Add the segment's attention to every slot's sum."""
        super().observe(view)
        if self.spec.family == "next-token" and view.segment.index == 0:
            return
        if self.attention == "cumulative":
            view.state += view.mass() * view.segment.length
        else:
            view.state.copy_(view.mass(torch.tensor([view.segment.length - 1])))

    def merge(self, view: View, stays: Tensor, leaves: Tensor, ranked: Tensor) -> None:
        """Draw what merges, and add its values."""
        leaving = ranked.masked_fill(~leaves, -torch.inf)
        merges = leaves & choose_best(leaving.flip(1), view.segment.length).flip(1)
        weight = measure_probabilities(view.state, merges, stays, self.merge_budget)
        if self.sample == "bernoulli":
            weight = (self._draw(view) < weight).float()
        values = add_values(view.cached_values(), weight, stays, self.merge_budget, normalise=self.normalise)
        view.replace(view.cached_keys(), values)

    def _draw(self, view: View) -> Tensor:
        """Draw a number for each slot, float32 [rows, slots], the same in any batch."""
        first, known = self.spec.first_head, dict.fromkeys(view.prompts)
        shape = (first + view.heads, view.segment.end)
        drawn = {
            prompt: draw_uniform(f"{self.seed}:{prompt}:{view.layer}:{view.segment.index}", shape)[first:]
            for prompt in known
        }
        rows = torch.cat([drawn[prompt] for prompt in view.prompts])
        return rows.to(view.position.device).gather(1, view.position.clamp(min=0))
