"""HeatKV, its binary variant and the naive schedule (arXiv:2605.14877)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.heatkv.order_file import read_orders
from kvbench.methods.heatkv.schedule import count_pruned_heads, fill_budget, schedule_evictions
from kvbench.methods.heatkv.scores import AttentionByScale, cas, rank_heads, scas
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Artifact, Observer, require_artifact
from kvbench.methods.shared.capacities import Ints
from kvbench.methods.shared.select import find_leading
from kvbench.methods.shared.set_aside import set_aside
from kvbench.methods.shared.view import View

NO_ORDERS = "method.orders: give an order file, or"


@dataclass
class HeatKV(Method):
    """Prune each source scale from the heads that future scales attend to least, just in time for the strict budget.

    Heads are ranked per source scale by S-CAS (Eq. 2 and 4); Eq. 5 says how many heads lose a source at each scale, and
    Algorithm 1 evicts early, deepest layers first, if a layer's new tokens would exceed B.

    Differs from the paper in: Algorithm 2 does not count tokens that the current scale has not produced yet (as in the
    released code; as printed it evicts nearly everything at once); evictions for scale k + 1 happen right after a layer
    ran at scale k, which changes no output; arithmetic is exact.

    Attributes:
        sinks: leading scales that are never pruned.
        leading: first tokens of a sequence that are never pruned; blocks and budget are counted without them.
        orders: official order file (JSON), used instead of a calibration.
        naive: evict everything that a scale prunes at its start (E_k = G_k without G_{k-1}, section 3.3).
        fill: fill the capacity that Eq. 5 leaves unused at the last scale with the best-ranked pruned head-scales that
            fit B at every step. This is kvbench's extension, not in the paper.
    """

    sinks: int
    leading: int = field(default=0, kw_only=True)
    orders: str | None = None
    naive: bool = False
    fill: bool = False

    static: ClassVar[bool] = True
    revision: ClassVar[int] = 1  # before, padding in front of a prompt reduced what is kept

    def needs(self) -> Observer | Path:
        """Return the calibration of S-CAS and CAS, or the order file."""
        return AttentionByScale() if self.orders is None else Path(self.orders)

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse sinks that do not fit and an order file of another model."""
        super().check(spec, budget)
        count_pruned_heads(*set_aside(spec, budget, self.sinks, self.leading), self.sinks)
        if self.orders is not None:
            read_orders(Path(self.orders), spec, self.sinks)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Build the eviction schedule from the calibrated or given ranking of heads."""
        super().prepare(spec, budget, artifact)
        rank = self._rank_heads(spec, artifact)
        rest = set_aside(spec, budget, self.sinks, self.leading)
        self.schedule = schedule_evictions(*rest, self.sinks, rank, naive=self.naive)
        if self.fill:
            self.schedule = fill_budget(*rest, self.schedule, rank)
        self._absent = torch.from_numpy(self.schedule.absent)

    def keep(self, view: View) -> Tensor:
        """Keep the first tokens, and the atoms present at the start of the next scale: bool [heads, slots]."""
        absent = self._absent[view.segment.index + 1, :, view.layer].T.to(view.segment_ids.device)
        return ~absent.gather(1, view.segment_ids.clamp(min=0)) | find_leading(view, self.leading)

    def _rank_heads(self, spec: ModelSpec, artifact: Artifact | None) -> Ints:
        if self.orders is not None:
            return read_orders(Path(self.orders), spec, self.sinks)
        return rank_heads(scas(require_artifact(artifact, NO_ORDERS)["mass"]))


@dataclass
class BinaryHeatKV(HeatKV):
    """Prune all source scales after the sinks from a head, or none (Binary-HeatKV; with `naive`, Table 3c's "Naive").

    Heads are ranked once by CAS (Eq. 3). `fill` keeps some sources of the best pruned heads, as no whole head fits.

    Differs from the paper in: official order files contain S-CAS orders only (no CAS order is published). With such a
    file heads are ranked by their mean rank over the sources.
    """

    def _rank_heads(self, spec: ModelSpec, artifact: Artifact | None) -> Ints:
        if self.orders is None:
            mass = require_artifact(artifact, NO_ORDERS)["mass"]
            return rank_heads(cas(mass, self.sinks)[..., None])[0]
        mean = read_orders(Path(self.orders), spec, self.sinks)[self.sinks : -1].mean(0)
        return rank_heads(torch.from_numpy(mean)[..., None])[0]
