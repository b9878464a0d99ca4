"""PriceKV by blocks: keeps the blocks that minimise the error of attention's output under a shared budget."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, Segment
from kvbench.core.storage import LEVELS
from kvbench.methods.pricekv.allocate import Weights, add_precisions, allocate, build_problem
from kvbench.methods.pricekv.errors import Importance, SubsetError
from kvbench.methods.pricekv.noise import PrecisionError, count_bits, list_precisions
from kvbench.methods.pricekv.problem import list_sources
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact, require_artifact
from kvbench.methods.shared.limits import Limit, set_limits
from kvbench.methods.shared.precision import Precision
from kvbench.methods.shared.select import check_capacity, find_leading
from kvbench.methods.shared.set_aside import set_aside
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View

MAX_SOURCES = 15
"""Maximum number n of sources of a segment; the calibration has an error for each of their 2^n sets."""


@dataclass
class PriceKVBlocks(Method):
    """Keep the past blocks whose removal changes a head's output most, with lifetimes optimised under the budget.

    This method is kvbench's own. A block is the tokens of one source scale (or of the prompt, or of a row of an image)
    in one head, and is kept or dropped as a whole. One calibration on full caches measures, for every head and every
    set of past blocks, the distance of attention's output from the full output, through the output projection
    (`errors.SubsetError`). Attention mass is only a proxy for this error: a large block may receive much attention but
    contain nothing that the current block does not contain.

    Capacity is allocated by Lagrange multipliers: a token has a price after every layer of every scale, the same for
    all heads. At given prices each head finds its optimal lifetimes exactly (dynamic programming over sets of blocks; a
    dropped block never comes back). Prices are iterated until the budget is nearly used wherever it can be. Then
    lifetimes are shortened where least error is added per token and step, free capacity is allocated where most error
    is saved, and blocks are exchanged while that lowers the error. The result never exceeds B, and no harmless block
    that would fit is left out.

    Nothing is computed during generation: the kept blocks depend only on layer, head and scale.

    With a menu (`method=pricekv/menu`) each block also has a precision, stored as codes of static codebooks. With
    `share` the unconditional branch may read the conditional branch's block and store none. The calibration then also
    measures the error that each precision of each block adds (`noise.PrecisionError`). These noises are nearly
    uncorrelated and add up, unlike the errors of dropped blocks. A precision never changes, capacity is in bytes, and
    the budget must be in bytes. Each lifetime of a block has one best precision, independent of other blocks, so the
    dynamic programme stays exact; local search also lowers and raises precisions.

    Attributes:
        sinks: leading segments that every head keeps to the end; 0: allocated like other blocks.
        leading: first tokens of a sequence that every head keeps to the end; blocks and budget are counted without
            them.
        importance: calibrated error: `output`, the squared error of the output, or `mass`, the attention lost.
        weights: weight of the error at a scale of t tokens: `inverse_tokens` 1/t, `uniform` 1, or `tokens` t.
        queries: number of evenly spaced queries of each segment in the calibration.
        recent: number of newest segments of a next-token model that a head can choose from, in addition to the first;
            older segments are kept only in free capacity. All scales can be chosen.
        menu: bits per value in which a block may be stored, of 16, 8, 4, 3 and 2; null: the run's cache dtype.
        share: whether the menu also has each precision stored once for both branches.
    """

    sinks: int = 0
    leading: int = field(default=0, kw_only=True)
    importance: Importance = "output"
    weights: Weights = "inverse_tokens"
    queries: int = 16
    recent: int = 8
    menu: Sequence[int] | None = None
    share: bool = False

    static: ClassVar[bool] = True
    limits = set_limits(queries=Limit(1), recent=Limit(1, MAX_SOURCES - 1))
    revision: ClassVar[int] = 2  # before, padding in front of a prompt reduced what is kept

    @property
    def uses(self) -> Uses:
        """Precisions for blocks, if there is a menu."""
        return Uses(precisions=bool(self.menu))

    @property
    def offered(self) -> tuple[Precision, ...]:
        """The menu's precisions, largest first."""
        return list_precisions(self.menu or (), shared=self.share)

    def needs(self) -> SubsetError:
        """Return the calibration of errors by sets of blocks and, with a menu, by precisions."""
        if self.menu:
            return PrecisionError(self.importance, self.queries, self.recent, self.offered)
        return SubsetError(self.importance, self.queries, self.recent)

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse too many scales, incompatible settings, and budgets below the sinks."""
        super().check(spec, budget)
        sources = list_sources(spec, self.recent)
        if len(sources[-1]) > MAX_SOURCES:
            raise ValueError(
                f"method=pricekv/blocks: {spec.name} has {len(sources[-1])} sources, above {MAX_SOURCES}; use pricekv"
            )
        available = self._check_menu(spec, budget) if self.menu else budget
        check_capacity(spec, available, self.sinks, leading=self.leading)

    def _check_menu(self, spec: ModelSpec, budget: Budget) -> Budget:
        """Check the settings that a menu requires; return the budget in tokens of the smallest precision."""
        menu = "[" + ",".join(map(str, self.menu or ())) + "]"
        if not set(self.menu or ()) <= set(LEVELS):
            raise ValueError(f"method.menu={menu}: bits must be of {', '.join(map(str, LEVELS))}")
        if self.importance != "output":
            raise ValueError(f"method.menu={menu}: needs method.importance=output")
        if self.leading:
            raise ValueError(
                f"method.leading={self.leading}: with method.menu a block is kept whole; set it to 0"
            )
        if self.share and not (spec.branches == 2 and spec.equal_branches):
            raise ValueError(
                f"method.share=true: {spec.name} has no second branch with the same positions; set method.share=false"
            )
        if budget.bytes is None:
            raise ValueError(f"method.menu={menu}: precisions differ in bytes; set budget_unit=bytes")
        bits = Fraction(count_bits(self.offered[-1], spec.branches), spec.branches)
        return replace(budget, capacity=budget.bytes / (2 * spec.head_dim * bits / 8))

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Allocate lifetimes and, with a menu, precisions to all blocks."""
        super().prepare(spec, budget, artifact)
        tensors = require_artifact(artifact, "method=pricekv/blocks:")
        sources = list_sources(spec, self.recent)
        rest, own = set_aside(spec, budget, self.sinks, self.leading)
        self.problem = build_problem(
            tensors["error"], rest, own, sources, weights=self.weights, forced=self.sinks
        )
        if self.menu:
            self.problem = add_precisions(
                self.problem, tensors["noise"], self.offered, spec, budget, self.weights
            )
        self.solution = allocate(self.problem)
        self._until = torch.from_numpy(self.solution.until).unflatten(0, (spec.layers, -1))

    def precisions(self, layer: int, segment: Segment) -> list[Precision] | None:
        """Return the precision of the segment's block in each head; None without a menu."""
        if not self.menu:
            return None
        of_layer = slice(layer * self.spec.heads, (layer + 1) * self.spec.heads)
        return [self.offered[index] for index in self.solution.precision[of_layer, segment.index].tolist()]

    def keep(self, view: View) -> Tensor:
        """Keep the first tokens, and the blocks that the next segment reads: bool [rows, slots]."""
        until = self._until[view.layer].to(view.segment_ids.device)
        needed = until.gather(1, view.segment_ids.clamp(min=0)) > view.segment.index
        return needed | find_leading(view, self.leading)
