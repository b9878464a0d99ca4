"""PriceKV: each head holds the past whose loss its output would miss most, at prices that make all heads fit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, Segment
from kvbench.core.storage import LEVELS, Precision
from kvbench.methods.pricekv.allocate import Weights, allocate, allocate_counts, offer, pose
from kvbench.methods.pricekv.errors import Importance, SubsetError
from kvbench.methods.pricekv.noise import PrecisionError, count_bits, list_precisions
from kvbench.methods.pricekv.sources import list_sources
from kvbench.methods.shared.base import Artifact, Limit, Method, require_artifact, set_limits
from kvbench.methods.shared.capabilities import MixedPrecision
from kvbench.methods.shared.select import check_capacity
from kvbench.methods.shared.view import View

MAX_SOURCES = 15
"""Sources beyond which sets of them are too many."""


@dataclass
class PriceKV(MixedPrecision, Method):
    """Hold, in each head, the past blocks whose loss changes its output most, while they are worth their capacity.

    A method of this project. A block is the tokens of one source scale (or of the prompt, or of a row of an image) in
    one head; it is held or dropped as a whole. One calibration on full caches measures, for every head and every set
    of past blocks that it could be left with, how far attention's output would lie from the full one, through the
    output projection (`errors.SubsetError`). This is the error itself, where attention mass is not: a late, large
    block may receive much attention and yet say nothing that the current block does not say too.

    Capacity is then sold: after every layer of every scale a token of it has a price, the same for all
    heads. Given the prices each head finds exactly what to hold when (a dynamic programme over sets of blocks, since
    what was dropped never comes back). Prices rise where too much is held and fall where too little is, until the
    budget is about used at every instant at which it can be. What is then still too much is shortened where least
    error is added per token and time, capacity that is left goes where most error is saved, and what is held is
    exchanged for what saves more as long as any of that is found. What is held never exceeds B, and when the cache is
    full no block is left out that would fit and do no harm.

    Nothing is computed while an image is made: what is kept depends on layer, head and scale alone.

    With a menu (`method=pricekv/menu`) a block that is held is also stored in the number of bits that is worth its
    capacity, as codes of static codebooks. With `share` the unconditional branch may read the block of the
    conditional one and store none. The calibration then also measures what each precision of each block by itself
    adds to the output's error (`noise.PrecisionError`): these noises have little to do with each other, so that they
    add up, which what dropping costs does not. A precision is kept for life. Capacity is sold by the byte, and the
    budget must be one of bytes. For each lifetime a block has one best precision, whatever else is held, and so the
    dynamic programme stays exact; then blocks are shortened or coarsened, and lengthened or refined.

    Attributes:
        sinks: leading segments that every head holds to the end; 0 leaves them to the prices as well.
        importance: what is calibrated: `output`, the squared error of the output, or `mass`, the attention lost.
        weights: what the error at a scale of t tokens counts: `inverse_tokens` 1/t, `uniform` 1, or `tokens` t.
        queries: evenly spaced queries of each segment that the calibration looks at.
        recent: of a next-token model, newest segments that a head can choose among, beside the first; older ones stay
            only where capacity is left. Scales are chosen among all.
        allocation: by `prices`, or by HeatKV's `counts`: of every block equally many heads lose it at a time.
        lifetimes: blocks may be dropped before the end; false: what a head holds at all it holds to the end.
        menu: bits of a number that a block may be stored in, of 16, 8, 4, 3 and 2; null: all blocks are stored as the
            run says.
        share: the menu also has each of these read by both branches of a prompt and stored once.
    """

    sinks: int = 0
    importance: Importance = "output"
    weights: Weights = "inverse_tokens"
    queries: int = 16
    recent: int = 8
    allocation: Literal["prices", "counts"] = "prices"
    lifetimes: bool = True
    menu: Sequence[int] | None = None
    share: bool = False

    static: ClassVar[bool] = True
    limits = set_limits(queries=Limit(1), recent=Limit(1, MAX_SOURCES - 1))
    revision: ClassVar[int] = 1  # capacity in which no block fitted was unused

    @property
    def mixes_precisions(self) -> bool:
        """Whether blocks are stored in precisions of a menu."""
        return bool(self.menu)

    @property
    def offered(self) -> tuple[Precision, ...]:
        """The menu's precisions, the largest first."""
        return list_precisions(self.menu or (), shared=self.share)

    def needs(self) -> SubsetError:
        """Return the calibration of errors by sets of blocks, and by precisions if there is a menu."""
        if self.mixes_precisions:
            return PrecisionError(self.importance, self.queries, self.recent, self.offered)
        return SubsetError(self.importance, self.queries, self.recent)

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse too many scales, settings that exclude each other, and budgets below the sinks."""
        super().check(spec, budget)
        sources = list_sources(spec, self.recent)
        if len(sources[-1]) > MAX_SOURCES:
            raise ValueError(
                f"method=pricekv: {spec.name} has {len(sources[-1])} source scales, it can choose among {MAX_SOURCES}"
            )
        if not self.lifetimes and (self.allocation == "counts" or len(sources[-1]) < len(sources) - 1):
            raise ValueError(
                "method.lifetimes=false: needs method.allocation=prices, and method.recent as large as the segments are"
            )
        check_capacity(spec, self._check_menu(spec, budget) if self.mixes_precisions else budget, self.sinks)

    def _check_menu(self, spec: ModelSpec, budget: Budget) -> Budget:
        """Check the settings that a menu requires; return the budget in tokens of the smallest precision."""
        menu = "[" + ",".join(map(str, self.menu or ())) + "]"
        if not set(self.menu or ()) <= set(LEVELS):
            raise ValueError(f"method.menu={menu}: bits of a number are of {', '.join(map(str, LEVELS))}")
        if self.importance != "output" or self.allocation != "prices":
            raise ValueError(
                f"method.menu={menu}: needs method.importance=output and method.allocation=prices"
            )
        if self.share and not (spec.branches == 2 and spec.equal_branches):
            raise ValueError(f"method.share=true: {spec.name} has no second branch of the same positions")
        if budget.bytes is None:
            raise ValueError(f"method.menu={menu}: precisions differ in bytes; set budget_unit=bytes")
        bits = Fraction(count_bits(self.offered[-1], spec.branches), spec.branches)
        return replace(budget, capacity=budget.bytes / (2 * spec.head_dim * bits / 8))

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Allocate the lifetimes."""
        super().prepare(spec, budget, artifact)
        tensors, sources = require_artifact(artifact, "method=pricekv:"), list_sources(spec, self.recent)
        self.problem = pose(tensors["error"], spec, budget, sources, weights=self.weights, forced=self.sinks)
        if self.mixes_precisions:
            self.problem = offer(self.problem, tensors["noise"], self.offered, spec, budget, self.weights)
        if self.allocation == "counts":
            self.holding = allocate_counts(self.problem, spec, budget)
        else:
            self.holding = allocate(replace(self.problem, lifetimes=self.lifetimes))
        self._until = torch.from_numpy(self.holding.until).unflatten(0, (spec.layers, -1))

    def precisions(self, layer: int, segment: Segment) -> list[Precision] | None:
        """Return the precision of the segment's block in each head, of those of the menu; None without one."""
        if not self.mixes_precisions:
            return None
        of_layer = slice(layer * self.spec.heads, (layer + 1) * self.spec.heads)
        return [self.offered[number] for number in self.holding.precision[of_layer, segment.index]]

    def keep(self, view: View) -> Tensor:
        """Keep the blocks that the next segment is to find."""
        until = self._until[view.layer].to(view.segment_ids.device)
        return until.gather(1, view.segment_ids.clamp(min=0)) > view.segment.index
