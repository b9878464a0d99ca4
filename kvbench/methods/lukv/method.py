"""LU-KV: heads keep the shares of a table of utilities, and another method's scores fill them (arXiv:2602.08585)."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.lukv.calibration import BudgetShares
from kvbench.methods.lukv.shares import Scope, allocate_shares, average_curves
from kvbench.methods.shared.capacities import Ints
from kvbench.methods.shared.full_scores import CalibratedCapacities, find_min_capacity
from kvbench.methods.shared.limits import SHARE, Limit, set_limits


@dataclass
class LUKV(CalibratedCapacities):
    """Allocate capacity to heads by a table of pruned shares, and keep the tokens that the base scores highest.

    A calibration on full caches of other prompts measures the utility of each token: its largest attention by later
    queries, times its share of the norms ||W_o v|| of the layer. For each prompt, heads discard tokens in the order of
    the base's scores, where the convex hull of the summed utility rises least. The table is the mean over prompts of
    the share that each head has discarded at 1 to 99 % (`BudgetShares`). In a run, the table is read after every
    segment at the compression of this moment.

    This is a reading of LU-KV: the paper's text was not available, so the method follows the public calibration
    programs and kvpress's LUKVPress.

    Differs from these in: the table is applied after every segment, under a budget that holds after every layer,
    instead of once to a prompt, with linear interpolation between its rows. The future that tokens are useful to is the
    rest of a generation (`list_contexts`), through `queries` of each segment, instead of sampled answers to 30
    questions about one text. The tokens of the base's sinks and window, which are never evicted, count as the most
    needed. Where a head cannot hold its share, the heads that lack most get the rest.

    Attributes:
        scope: heads that compete: of the whole model (`global`), or of each `layer`.
        floor: share of the tokens that a head keeps at least, at most B / T; at least what the base needs.
        lookup: average the shares of prompts (`table`), or their loss curves (`curve`), as PriceKV does.
        queries: number of evenly spaced queries of each segment in the calibration.
        calibration_prompts: default of `calibrate.count`.
    """

    scope: Scope = "global"
    floor: float = 0.01
    lookup: Literal["table", "curve"] = "table"
    queries: int = 64
    calibration_prompts: int = 10

    limits = set_limits(floor=SHARE, queries=Limit(1), calibration_prompts=Limit(1))

    def needs(self) -> BudgetShares:
        """Return the calibration of the shares, which includes the base's calibration."""
        return BudgetShares(self.base, self.queries, self.scope, self.floor)

    def allocate(self, tensors: dict[str, Tensor], spec: ModelSpec, budget: Budget) -> Ints:
        """Return the capacity of each head after each cached segment, int64 [K - 1, L, H]."""
        if self.lookup == "table":
            table = tensors["pruned"].numpy()
        else:
            table = average_curves(tensors["losses"].numpy(), self.floor, self.scope)
        minimum = find_min_capacity(self.base, spec)
        return allocate_shares(table, spec, budget.tokens, floor=self.floor, minimum=minimum)
