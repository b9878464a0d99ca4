"""PriceKV: each head holds the past whose loss its output would miss most, at prices that make all heads fit."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.base import Artifact, Method, View
from kvbench.methods.pricekv.allocate import Weights, allocate, allocate_counts, pose
from kvbench.methods.pricekv.errors import Importance, SubsetError
from kvbench.methods.pricekv.sources import list_sources
from kvbench.methods.select import check_room

MOST_SOURCES = 15
"""Sources beyond which sets of them are too many."""


@dataclass
class PriceKV(Method):
    """Hold, in each head, the past blocks whose loss its output would miss most, as long as they are worth their room.

    A method of this project. A block is the tokens of one source scale (or of the prompt, or of a row of an image) in
    one head; it is held or dropped as a whole. One calibration on full caches measures, for every head and every set
    of past blocks that it could be left with, how far attention's output would lie from the full one, through the
    output projection (`errors.SubsetError`). This is the error itself, where attention mass is not: a late, large
    block may receive much attention and yet say nothing that the current block does not say too.

    Room in the cache is then sold: after every layer of every scale a token of room has a price, the same for all
    heads. Given the prices each head finds exactly what to hold when (a dynamic programme over sets of blocks, since
    what was dropped never comes back). Prices rise where too much is held and fall where too little is, until the
    budget is about used at every instant at which it can be. What is then still too much is shortened where least
    error is added per token and time, room that is left goes where most error is saved, and what is held is exchanged
    for what saves more as long as any of that is found. What is held never exceeds B, and when the cache is full no
    block is left out that would fit and do no harm.

    Nothing is computed while an image is made: what is kept depends on layer, head and scale alone.

    Attributes:
        sinks: leading segments that every head holds to the end; 0 leaves them to the prices as well.
        importance: what is calibrated: `output`, the squared error of the output, or `mass`, the attention lost.
        weights: what the error at a scale of t tokens counts: `inverse_tokens` 1/t, `uniform` 1, or `tokens` t.
        queries: evenly spaced queries of each segment that the calibration looks at.
        recent: of a next-token model, newest segments that a head can choose among, beside the first; older ones stay
            only where room is left. Scales are chosen among all.
        allocation: by `prices`, or by HeatKV's `counts`: of every block equally many heads lose it at a time.
        lifetimes: blocks may be dropped before the end; false: what a head holds at all it holds to the end.
    """

    sinks: int = 0
    importance: Importance = "output"
    weights: Weights = "inverse_tokens"
    queries: int = 16
    recent: int = 8
    allocation: Literal["prices", "counts"] = "prices"
    lifetimes: bool = True

    static: ClassVar[bool] = True

    def needs(self) -> SubsetError:
        """Return the calibration of errors by sets of blocks."""
        return SubsetError(self.importance, self.queries, self.recent)

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse settings out of range, too many scales, and budgets below the sinks."""
        super().check(spec, budget)
        if self.queries < 1:
            raise ValueError(f"method.queries={self.queries}: must be at least 1")
        if not 1 <= self.recent < MOST_SOURCES:
            raise ValueError(f"method.recent={self.recent}: must lie in 1..{MOST_SOURCES - 1}")
        sources = list_sources(spec, self.recent)
        if len(sources[-1]) > MOST_SOURCES:
            raise ValueError(
                f"method=pricekv: {spec.name} has {len(sources[-1])} source scales, it can choose among {MOST_SOURCES}"
            )
        if not self.lifetimes and (self.allocation == "counts" or len(sources[-1]) < len(sources) - 1):
            raise ValueError(
                "method.lifetimes=false: needs method.allocation=prices, and method.recent as large as the segments are"
            )
        check_room(spec, budget, self.sinks)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Allocate the lifetimes.

        Raises:
            ValueError: no calibration, or a setting out of range.
            InfeasibleBudget: the sinks exceed the budget.
        """
        super().prepare(spec, budget, artifact)
        if artifact is None:
            raise ValueError("method=pricekv: calibrate first (python run.py task=calibrate)")
        error, sources = artifact.tensors["error"], list_sources(spec, self.recent)
        self.problem = pose(error, spec, budget, sources, weights=self.weights, forced=self.sinks)
        if self.allocation == "counts":
            self.holding = allocate_counts(self.problem, spec, budget)
        else:
            self.holding = allocate(self.problem, lifetimes=self.lifetimes)
        self._until = torch.from_numpy(self.holding.until).unflatten(0, (spec.layers, -1))

    def keep(self, view: View) -> Tensor:
        """Keep the blocks that the next segment is to find."""
        until = self._until[view.layer].to(view.segment.device)
        return until.gather(1, view.segment.clamp(min=0)) > view.at.index
