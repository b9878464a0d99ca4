"""Hard-KV: each head keeps the tokens that hold a share of the newest queries' attention mass."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import Family, ModelSpec, Segment
from kvbench.methods.hardkv.calibration import (
    Calibration,
    Selector,
    mark_top_p,
    pool_scores,
    solve_temperatures,
    weigh_redundancy,
)
from kvbench.methods.hardkv.merging import MergePlan, merge_exactly, merge_fixed_budget, merge_multi_to_one
from kvbench.methods.hardkv.official import SINKS, rank_rewritten, select_sparse, weigh_slots
from kvbench.methods.shared.calibration import Artifact
from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.redundancy import measure_redundancy
from kvbench.methods.shared.scored import LARGEST, Scored
from kvbench.methods.shared.select import (
    average_attention,
    check_window,
    choose_best,
    find_sinks,
    find_valid_queries,
    require_numbers,
    softmax_seen,
)
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View

Select = Literal["top_p", "votes", "top_k", "official_sparse", "official_rewrite"]
Merge = Literal["none", "fixed", "multi", "exact"]
VARIABLE_LENGTH = ("top_p", "official_sparse")
"""Selections with which heads keep different numbers of tokens."""


@dataclass
class HardKV(Scored):
    """Keep the tokens that a segment's newest queries select, sinks and the latest tokens (Hard-KV, section 3.1, 3.2).

    Each query marks the smallest set of tokens with the share `p` of its attention, after a selector altered the scores
    and a temperature calibrated them. `top_p` keeps every token that a query marked (the paper's cautious update), at
    most B / heads in each head (its upper budget), and drops nothing from heads that hold at most the share `start` of
    it (its lower budget). `votes` keeps the same number in every head, the tokens with the most marks. `top_k` keeps
    the same number in every head by mean probability, which is the selector without Hard-KV.

    Two selections follow the released program instead of the paper (`official`), to compare with its results. They need
    `calibration: official`, which does not change raw scores, and keep the first token. `official_sparse` marks the
    tokens with the share `p` of the queries' mean attention, and the best `start` of B regardless of mass. The program
    only hides other tokens and has no cap; here they are evicted and the best B / heads are kept. `official_rewrite`
    drops nothing up to B / heads tokens; then it keeps the latest, all marked tokens and, in free capacity, the oldest
    other tokens: if too many are marked, it loses the newest. Slots stay in order of time here. The program uses 128
    queries, and a window of 127 for sparse `vanilla` and for `rkv`, otherwise of 32.

    Differs from the paper in: tokens that are not selected are evicted at once, not hidden until a rewrite (a hidden
    token is never attended to again, so the result is the same); with the full budget nothing is dropped; queries do
    not see later tokens, which are all in the window; every head of every request has its own temperature; `start` is
    compared with the tokens of each head, not with the allocated length of the request; `gradient` takes at most 50
    steps on the root mean square error, the released program 10 on the mean square error; evictions are decided before
    merge targets are known, so merging never keeps a token. Slots stay in order of time.

    Evicted tokens can be merged into kept tokens (appendix G), except sinks and the window. `fixed` averages pairs, the
    evicted token of lowest score with the target of most attention, and loses the lowest scores if there are too few
    targets (the program stops there). `multi` averages all evicted tokens with the best target. Weights are the mean
    attention of the voting queries (of the query head with the highest score). `exact`, which is not in the paper,
    keeps the key of the heavier token with a bias that preserves the pair's mean attention; keys and values become
    eight channels wider for it, which the ledger counts.

    Attributes:
        selector: how scores are altered: not, maximum over neighbours, or R-KV's redundancy.
        select: see above.
        p: share of the mass, in (0, 1].
        start: share of B at which `top_p` begins to evict, in [0, 1].
        calibration: how temperatures are found, once per request, when it first evicts.
        queries: number of newest queries of a segment that vote; in the paper all queries of an interval (section 3.1).
        window: number of latest tokens that are kept.
        merge: how evicted tokens are merged, see above.
        kernel: window of `snapkv`'s maximum in slots, odd.
        mix: lambda of `rkv`.
        threshold: cosine similarity above which `rkv` treats keys as near copies.
        protected: number of latest near copies of a key that `rkv` treats as different.
        watch_lse: record the change of the voting queries' log-sum-exp by each eviction, in nats, in the ledger.
    """

    selector: Selector = "snapkv"
    select: Select = "top_p"
    p: float = 0.9
    start: float = 0.5
    calibration: Calibration = "bisection"
    queries: int = 128
    window: int = 32
    merge: Merge = "none"
    kernel: int = 7
    mix: float = 0.07
    threshold: float = 0.5
    protected: int = 1
    watch_lse: bool = False
    _temperatures: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    families: ClassVar[tuple[Family, ...]] = ("next-token",)
    revision: ClassVar[int] = 3  # before, sinks were dropped if a head could not hold them and the window
    limits = set_limits(
        start=Limit(0, 1, "must lie in [0, 1]"),
        mix=Limit(0, 1, "must lie in [0, 1]"),
        protected=Limit(0),
        queries=Limit(1),
    )

    @property
    def uses(self) -> Uses:
        """Requirements of `Scored`; replaced contents and bias to merge; the log-sum-exp of the voting queries."""
        replaces, bias = self.merge != "none", self.merge == "exact"
        lse_queries = self.queries if self.watch_lse else 0
        return replace(super().uses, replaces=replaces, bias=bias, lse_queries=lse_queries)

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse settings that are out of range or incompatible, and what `Scored` refuses."""
        if not 0 < self.p <= 1:
            raise ValueError(f"method.p={self.p}: must lie in (0, 1]")
        check_window(self.window, self.kernel, "last")
        if self.select.startswith("official") and self.calibration != "official":
            raise ValueError(
                f"method.select={self.select}: the released program has one temperature; set "
                "method.calibration=official"
            )
        if self.select in VARIABLE_LENGTH and (self.refresh != 1 or self.ema):
            name, off = ("refresh", 1) if self.refresh != 1 else ("ema", 0)
            raise ValueError(
                f"method.{name}={getattr(self, name)}: method.select={self.select} marks by the present attention; "
                f"set method.{name}={off} or method.select=top_k"
            )
        super().check(spec, budget)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Share the budget equally among all heads and clear the temperatures."""
        super().prepare(spec, budget, artifact)
        self._temperatures.clear()

    def capacity(self, layer: int, segment: Segment) -> int | tuple[int, ...] | None:
        """Return an equal share of B; None if heads keep different numbers of tokens."""
        return None if self.select in VARIABLE_LENGTH else self.share(layer, segment)

    def min_capacity(self, view: View) -> int:
        """Return the number of tokens that a head may hold before it evicts."""
        share = super().min_capacity(view)
        early = self.select in VARIABLE_LENGTH and self.budget.fraction < 1
        return int(self.start * share) if early else share

    def observe(self, view: View) -> None:
        """Drop the layer's temperatures of the previous texts."""
        if view.segment.index == 0:
            self._temperatures.pop(view.layer, None)

    def smoothed_scores(self, view: View) -> Tensor:
        """Return the score of each slot, float64 [rows, slots], finite if there are sinks, which rank above these."""
        scores = super().smoothed_scores(view)
        return scores.clamp(max=LARGEST) if self.leading or self.sinks else scores

    def select_slots(self, view: View, ranked: Tensor) -> Tensor:
        """Choose sinks, latest and selected tokens, bool [rows, slots], and merge evicted tokens if configured."""
        exists = view.position >= 0
        capacity = self.row_capacities(view)
        if self.select in VARIABLE_LENGTH:
            # Flipped, so that the latest of equal slots is kept.
            best = choose_best(ranked.flip(1), capacity).flip(1)
            early = exists.sum(1, keepdim=True) <= self.min_capacity(view)
            mask = exists & best & ((ranked >= 1) | early)
        else:
            mask = exists & choose_best(ranked, capacity)
        if self.merge != "none":
            self._merge(view, ranked, exists, mask)
        return mask

    def _merge(self, view: View, scores: Tensor, exists: Tensor, mask: Tensor) -> None:
        """Merge the contents of evicted slots into kept slots."""
        chosen = self._choose_queries(view)
        mass = average_attention(
            view.scores(chosen),
            exists,
            softmax="all",
            group="mean" if self.merge == "exact" else "max",
            asking=find_valid_queries(view, chosen),
        )
        targets = mask & ~self._find_latest(exists) & ~self._find_first(view, exists)
        plan = MergePlan(scores, mass, exists & ~mask, targets)
        keys, values = view.cached_keys(), view.cached_values()
        if self.merge == "exact":
            view.replace(*merge_exactly(keys, values, view.bias(), plan))
        else:
            average = merge_fixed_budget if self.merge == "fixed" else merge_multi_to_one
            view.replace(*average(keys, values, plan))

    def score(self, view: View) -> Tensor:
        """Return votes plus mean probability, infinity for the latest tokens: float64 [rows, slots].

        With 64 votes or more, float32 has too few digits to distinguish slots by the mean.
        """
        exists = view.position >= 0
        chosen = self._choose_queries(view)
        raw = view.scores(chosen).amax(1)
        valid_queries = find_valid_queries(view, chosen)
        if self.select.startswith("official"):
            return self._score_officially(view, raw, exists, valid_queries)
        altered = self._alter(raw, view, exists)
        evicting = exists.sum(1) > self.min_capacity(view)
        temperatures = self._find_temperatures(view.layer, evicting, raw, altered, valid_queries)
        probabilities = softmax_seen(altered / temperatures[:, None, None])
        if valid_queries is not None:
            probabilities = probabilities.masked_fill(~valid_queries[..., None], 0)
        scores = probabilities.mean(1).double()
        if self.select != "top_k":
            marked = mark_top_p(probabilities, self.p) & exists[:, None]
            scores += (marked if valid_queries is None else marked & valid_queries[..., None]).sum(1)
        return scores.masked_fill(self._find_latest(exists), torch.inf)

    def _score_officially(
        self, view: View, raw: Tensor, exists: Tensor, valid_queries: Tensor | None
    ) -> Tensor:
        """Return the scores of the released code, float32 [rows, slots].

        `official_sparse`: mean probability, plus 1 for visible slots, and infinity at both ends. `official_rewrite`:
        the negative rank.
        """
        sparse = self.select == "official_sparse"
        alter = partial(self._alter, view=view, exists=exists)
        probabilities = weigh_slots(raw, alter, self.selector, exists, valid_queries, averaged=sparse)
        require_numbers(probabilities)
        if not sparse:
            return -rank_rewritten(mark_top_p(probabilities, self.p).any(1), exists, self.window).float()
        mean, min_tokens = probabilities[:, 0], self.min_capacity(view)
        count = min(max(min_tokens - self.window - SINKS, 0), mean.shape[1])
        scores = mean + select_sparse(mean, self.p, count, self.window)
        scores[:, :SINKS] = torch.inf
        return scores.masked_fill(self._find_latest(exists), torch.inf)

    def _choose_queries(self, view: View) -> Tensor:
        """Return the indices of the voting queries, int64 [n]."""
        return torch.arange(max(0, view.segment.length - self.queries), view.segment.length)

    def _find_first(self, view: View, exists: Tensor) -> Tensor:
        """Return the sinks and the first tokens of each row, bool [rows, slots]."""
        return exists & find_sinks(view, self.sinks, self.leading)

    def _find_latest(self, exists: Tensor) -> Tensor:
        """Return the window of each row, bool [rows, slots]."""
        return exists & (exists.flip(1).cumsum(1).flip(1) <= self.window)

    def _alter(self, raw: Tensor, view: View, exists: Tensor) -> Tensor:
        if self.selector == "vanilla":
            return raw
        if self.selector == "snapkv":
            return pool_scores(raw, exists, self.kernel)
        redundancy = measure_redundancy(view.cached_keys(), exists, self.threshold, self.protected)
        return weigh_redundancy(raw, exists, redundancy, self.mix)

    def _find_temperatures(
        self, layer: int, evicting: Tensor, raw: Tensor, altered: Tensor, valid_queries: Tensor | None
    ) -> Tensor:
        """Return a layer's temperatures, float32 [rows], which are fixed when a row first evicts."""
        known = self._temperatures.get(layer)
        if known is None:
            known = raw.new_full((len(raw),), torch.nan)
        elif not known.isnan().any():
            return known
        counts = mark_top_p(softmax_seen(raw), self.p).sum(-1)
        solution = solve_temperatures(altered, counts, self.p, self.calibration, valid_queries)
        temperatures = torch.where(known.isnan(), solution, known)
        self._temperatures[layer] = torch.where(evicting, temperatures, known)
        return temperatures
