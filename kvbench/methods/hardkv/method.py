"""Hard-KV: what the queries of an interval need of their probability mass, every head by itself."""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import Family, ModelSpec, Segment
from kvbench.methods.hardkv.calibration import Calibration, mark_top_p, solve_temperatures
from kvbench.methods.hardkv.merging import Choice, merge_exactly, merge_fixed_budget, merge_multi_to_one
from kvbench.methods.hardkv.official import SINKS, rank_rewritten, select_sparse, weigh_slots
from kvbench.methods.hardkv.selectors import Selector, pool_scores, weigh_redundancy
from kvbench.methods.shared.base import Artifact, Limit, set_limits
from kvbench.methods.shared.capabilities import RecordsLse, ReplacesContents
from kvbench.methods.shared.redundancy import measure_redundancy
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import (
    average_attention,
    check_capacity,
    check_window,
    choose_best,
    find_sinks,
    find_valid_queries,
    require_numbers,
    softmax_seen,
    spread_capacity,
)
from kvbench.methods.shared.view import View

Select = Literal["top_p", "votes", "top_k", "official_sparse", "official_rewrite"]
Merge = Literal["none", "fixed", "multi", "exact"]
UNEVEN = ("top_p", "official_sparse")
"""Heads keep as many as are marked; by the others, equally many."""


@dataclass
class HardKV(ReplacesContents, RecordsLse, Scored):
    """Keep what the newest queries of a segment select, sinks and the latest tokens (Hard-KV, sections 3.1 and 3.2).

    Each query marks the fewest tokens that have the share `p` of its attention; a selector alters scores before, and a
    temperature calibrates what it made. `top_p` keeps every token that one of them marked (the paper's cautious
    update), so that heads become as long as they need, up to B / heads each (its upper budget), and drop nothing until
    they are longer than `start` of that (its lower one). `votes` keeps equally many in every head, those that most
    queries marked. `top_k` keeps equally many of highest mean probability, which is what selectors do by themselves.

    Two more do what the released program does in place of the paper (`official`), for comparison with its results; they
    go with `calibration: official`, which raw scores are spared, and keep the first token. `official_sparse` marks the
    tokens that have the share `p` of the queries' mean attention and the best of `start` of B whatever their mass; the
    program only hides the others and has no cap, here they are gone and the best of B / heads stay.
    `official_rewrite` drops nothing up to B / heads tokens; then it keeps the latest, those that any query marked and,
    where capacity is left, the oldest others: of too many marked tokens it loses the newest. Its slots stay in order of
    time here. The program's queries are 128, its window is 32, but 127 for sparse `vanilla` and for `rkv`.

    Differs from the paper in: what is not selected is gone at once, in place of a mask that hides it until a rewrite
    (a hidden token is never attended to again, so that the result is the same); under the whole budget nothing is
    dropped; queries do not see tokens behind them, all of which lie in the window; every head of every request has its
    own temperature; `start` is compared with the tokens that each head holds, in the paper with the allocated length of
    the whole request; `gradient` takes at most 50 steps on the root mean square error, the released program 10 on the
    mean square; which tokens leave is decided before those that take them in are known, so that merging never keeps a
    token. Slots stay in order of time.

    What leaves can be merged into what stays (appendix G), except into sinks and the window: `fixed` averages each
    token that leaves with one that stays, the least with the one of most attention, and loses the least where more
    leave than may take (the program stops there); `multi` averages all of them with the best one. Their weights are the
    mean attention of the voting queries (of the query head with the highest score). `exact`, which is ours, keeps the
    key of the heavier one and gives it a bias, so that the pair's mean attention stays; keys and values become eight
    channels wider for it, which the ledger's bytes count.

    Attributes:
        selector: what scores are made of: the raw ones, their maximum over neighbours, or R-KV's.
        select: see above.
        p: share of the mass, in (0, 1].
        start: share of B at which `top_p` begins to drop, in [0, 1].
        calibration: how temperatures are found, once a request, when it first drops something.
        queries: the last so many queries of a segment vote; in the paper all of an interval do (section 3.1).
        window: latest tokens that stay.
        leading: first tokens of a text that stay, in the paper one.
        merge: what becomes of tokens that leave: nothing, or see above.
        kernel: slots that `snapkv` takes together, odd.
        mix: `rkv`'s lambda.
        threshold: cosine similarity above which `rkv` takes keys for near copies.
        protected: latest near copies of every key that it lets count as different.
        watch_lse: note in the ledger by how many nats each drop changes the log-sum-exp of the voting queries.
    """

    selector: Selector = "snapkv"
    select: Select = "top_p"
    p: float = 0.9
    start: float = 0.5
    calibration: Calibration = "bisection"
    queries: int = 128
    window: int = 32
    leading: int = 0
    merge: Merge = "none"
    kernel: int = 7
    mix: float = 0.07
    threshold: float = 0.5
    protected: int = 1
    watch_lse: bool = False
    _temperatures: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    families: ClassVar[tuple[Family, ...]] = ("next-token",)
    revision: ClassVar[int] = 2  # means beside many votes were ties, and NaN from a gradient was
    limits = set_limits(
        start=Limit(0, 1, "must lie in [0, 1]"),
        mix=Limit(0, 1, "must lie in [0, 1]"),
        leading=Limit(0),
        protected=Limit(0),
        queries=Limit(1),
    )

    @property
    def biased(self) -> bool:
        """Whether merging leaves a bias."""
        return self.merge == "exact"

    @property
    def replaces(self) -> bool:
        """Whether tokens that leave are merged into others."""
        return self.merge != "none"

    @property
    def lse_queries(self) -> int:
        """Number of observed queries: those that vote, if any."""
        return self.queries if self.watch_lse else 0

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse settings out of range, and what `Scored` refuses."""
        if not 0 < self.p <= 1:
            raise ValueError(f"method.p={self.p}: must lie in (0, 1]")
        check_window(self.window, self.kernel, "last")
        if self.select.startswith("official") and self.calibration != "official":
            raise ValueError(
                f"method.select={self.select}: the released program has one temperature; set "
                "method.calibration=official"
            )
        if self.select in UNEVEN and (self.refresh != 1 or self.ema):
            name, off = ("refresh", 1) if self.refresh != 1 else ("ema", 0)
            raise ValueError(
                f"method.{name}={getattr(self, name)}: method.select={self.select} marks by the present attention; set "
                f"method.{name}={off}, or method.select=top_k"
            )
        super().check(spec, budget)
        check_capacity(spec, budget, self.sinks, self.leading)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Share the budget among all heads and forget every temperature."""
        super().prepare(spec, budget, artifact)
        self._temperatures.clear()

    def capacity(self, layer: int, segment: Segment) -> int | tuple[int, ...] | None:
        """Return an even share of B; None where as many stay as are marked."""
        return None if self.select in UNEVEN else self.share(layer, segment)

    def min_capacity(self, view: View) -> int:
        """Return how many tokens every head of the layer may hold before anything is dropped."""
        whole = super().min_capacity(view)
        early = self.select in UNEVEN and self.budget.fraction < 1
        return int(self.start * whole) if early else whole

    def observe(self, view: View) -> None:
        """Forget the temperatures of the texts before."""
        if view.segment.index == 0:
            self._temperatures.pop(view.layer, None)

    def rank(self, view: View) -> Tensor:
        """Return what each slot is worth, float64 [rows, slots]: infinity for sinks and the first tokens."""
        exists = view.position >= 0
        worth = self.rate(view).masked_fill(self._find_first(view, exists), torch.inf)
        return worth.masked_fill_(~exists, -torch.inf)

    def choose(self, view: View, ranked: Tensor) -> Tensor:
        """Choose the sinks, the latest tokens, and what was selected of the rest; merge what leaves if asked to."""
        exists = view.position >= 0
        capacity = spread_capacity(self.share(view.layer, view.segment), view)
        if self.select in UNEVEN:
            # Turned around, so that the latest of equals stays.
            best = choose_best(ranked.flip(1), capacity).flip(1)
            early = exists.sum(1, keepdim=True) <= self.min_capacity(view)
            kept = exists & best & ((ranked >= 1) | early)
        else:
            kept = exists & choose_best(ranked, capacity)
        if self.merge != "none":
            self._merge(view, ranked, exists, kept)
        return kept

    def _merge(self, view: View, worth: Tensor, exists: Tensor, kept: Tensor) -> None:
        """Replace the contents of kept slots by what they take in."""
        chosen = self._choose_queries(view)
        mass = average_attention(
            view.scores(chosen),
            exists,
            softmax="all",
            group="mean" if self.merge == "exact" else "max",
            asking=find_valid_queries(view, chosen),
        )
        takes = kept & ~self._find_latest(exists) & ~self._find_first(view, exists)
        choice = Choice(worth, mass, exists & ~kept, takes)
        keys, values = view.cached_keys(), view.cached_values()
        if self.merge == "exact":
            view.replace(*merge_exactly(keys, values, view.bias(), choice))
        else:
            average = merge_fixed_budget if self.merge == "fixed" else merge_multi_to_one
            view.replace(*average(keys, values, choice))

    def score(self, view: View) -> Tensor:
        """Return infinity for the latest tokens, for others votes and mean probability: float64 [rows, slots].

        Float32 would leave a mean beside 64 votes or more too few digits to tell slots apart.
        """
        exists = view.position >= 0
        chosen = self._choose_queries(view)
        raw = view.scores(chosen).amax(1)
        asking = find_valid_queries(view, chosen)
        if self.select.startswith("official"):
            return self._score_officially(view, raw, exists, asking)
        altered = self._alter(raw, view, exists)
        dropping = exists.sum(1) > self.min_capacity(view)
        temperatures = self._recall(view.layer, dropping, raw, altered, asking)
        probabilities = softmax_seen(altered / temperatures[:, None, None])
        if asking is not None:
            probabilities = probabilities.masked_fill(~asking[..., None], 0)
        worth = probabilities.mean(1).double()
        if self.select != "top_k":
            marked = mark_top_p(probabilities, self.p) & exists[:, None]
            worth += (marked if asking is None else marked & asking[..., None]).sum(1)
        return worth.masked_fill(self._find_latest(exists), torch.inf)

    def _score_officially(self, view: View, raw: Tensor, exists: Tensor, asking: Tensor | None) -> Tensor:
        """Return mean probability, 1 more where a slot stays, infinity at both ends; or places, the first highest."""
        sparse = self.select == "official_sparse"
        alter = partial(self._alter, view=view, exists=exists)
        found = weigh_slots(raw, alter, self.selector, exists, asking, averaged=sparse)
        require_numbers(found)
        if not sparse:
            return -rank_rewritten(mark_top_p(found, self.p).any(1), exists, self.window).float()
        mean, min_tokens = found[:, 0], self.min_capacity(view)
        count = min(max(min_tokens - self.window - SINKS, 0), mean.shape[1])
        worth = mean + select_sparse(mean, self.p, count, self.window)
        worth[:, :SINKS] = torch.inf
        return worth.masked_fill(self._find_latest(exists), torch.inf)

    def _choose_queries(self, view: View) -> Tensor:
        """Return the numbers of the queries that vote, int64 [n]."""
        return torch.arange(max(0, view.segment.length - self.queries), view.segment.length)

    def _find_first(self, view: View, exists: Tensor) -> Tensor:
        """Return which slots are sinks or among the first tokens of their row, bool [rows, slots]."""
        return exists & (find_sinks(view, self.sinks) | (exists.cumsum(1) <= self.leading))

    def _find_latest(self, exists: Tensor) -> Tensor:
        """Return which slots are the window of their row, bool [rows, slots]."""
        return exists & (exists.flip(1).cumsum(1).flip(1) <= self.window)

    def _alter(self, raw: Tensor, view: View, exists: Tensor) -> Tensor:
        if self.selector == "vanilla":
            return raw
        if self.selector == "snapkv":
            return pool_scores(raw, exists, self.kernel)
        redundancy = measure_redundancy(view.cached_keys(), exists, self.threshold, self.protected)
        return weigh_redundancy(raw, exists, redundancy, self.mix)

    def _recall(
        self, layer: int, dropping: Tensor, raw: Tensor, altered: Tensor, asking: Tensor | None
    ) -> Tensor:
        """Return a layer's temperatures, float32 [rows]: each row's is of the time when it first drops something."""
        known = self._temperatures.get(layer)
        if known is None:
            known = raw.new_full((len(raw),), torch.nan)
        elif not known.isnan().any():
            return known
        needed = mark_top_p(softmax_seen(raw), self.p).sum(-1)
        found = solve_temperatures(altered, needed, self.p, self.calibration, asking)
        temperatures = torch.where(known.isnan(), found, known)
        self._temperatures[layer] = torch.where(dropping, temperatures, known)
        return temperatures
