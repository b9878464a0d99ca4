"""Calibration of LU-KV: what tokens are worth to later segments, in the order of another method's scores."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec
from kvbench.methods.lukv.shares import PERCENTS, Scope, discard, find_marginal_losses, sum_percents
from kvbench.methods.shared.capacities import Floats
from kvbench.methods.shared.full_scores import (
    FullScores,
    find_existing,
    find_min_capacity,
    scatter_to_positions,
)
from kvbench.methods.shared.utility import attend_evenly, measure_utility
from kvbench.methods.shared.view import View


@dataclass
class Context:
    """Tokens up to a segment, whose utility to the segments after it is being measured.

    Attributes:
        counts: tokens of each sequence.
        order: positions in the order of need by layer, int64 [rows, positions]; the last positions are evicted first.
        utility: maximum utility so far by layer, float32 [rows, positions].
    """

    counts: list[int]
    order: list[Tensor] = field(default_factory=list)
    utility: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class BudgetShares(FullScores):
    """Calibrated share of tokens that each head discards at a global compression.

    A context is all tokens up to a segment, and its future the segments until `list_contexts`. The utility of a token
    is its largest contribution to the future (`utility.measure_utility`); the base's scores at the end of the context
    order the tokens. The tensor `pruned` is float64 [99, L, H], the mean over contexts of each head's pruned share at 1
    to 99 %, and `losses` float64 [L, H, 100], the mean of the losses of each further percent of the tokens, least
    needed first.

    Attributes:
        scope: heads that compete.
        floor: share of its tokens that a head keeps at least.
    """

    scope: Scope = "global"
    floor: float = 0.01

    kind: ClassVar[str] = "budget_shares"

    def own_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `pruned`, [percents - 1, L, H], and of `losses`, [L, H, percents]."""
        heads = (spec.layers, spec.heads)
        return {"pruned": (PERCENTS - 1, *heads), "losses": (*heads, PERCENTS)}

    def prepare(self, spec: ModelSpec) -> None:
        """Set the sums to zero, and list the contexts."""
        super().prepare(spec)
        self._ends = list_contexts(spec)
        self._open: dict[int, Context] = {}
        self._measured = 0

    def measure(self, view: View) -> None:
        """Add the utility of open contexts to a segment, and begin and end contexts."""
        index, layer = view.segment.index, view.layer
        if index == layer == 0:
            self._close_all()  # texts may end inside of a context's future
        if earlier := {start: context for start, context in self._open.items() if start < index}:
            attention = attend_evenly(view, self.queries)
            for start, context in earlier.items():
                end = self.spec.ends[start]
                utility = scatter_to_positions(measure_utility(view, attention, end), view)[:, :end]
                before = context.utility.get(layer)
                context.utility[layer] = utility if before is None else torch.maximum(before, utility)
        if layer == self.spec.layers - 1:
            for start in [start for start in self._open if self._ends[start] == index]:
                self._close(self._open.pop(start))
        if index in self._ends:
            if not layer:
                counts = (view.position[:: view.heads] >= 0).sum(1).tolist()
                self._open[index] = Context(counts)
            self._open[index].order.append(self._order(view))

    def average(self) -> dict[str, Tensor]:
        """Return the means over contexts, and the tensors of the base's calibration."""
        self._close_all()
        means = {name: self.sums[name] / max(self._measured, 1) for name in self.own_shapes(self.spec)}
        return super().average() | means

    def _order(self, view: View) -> Tensor:
        """Return the positions in the order of need, int64 [rows, c_k]; positions without a token are last.

        A token is needed at the smallest capacity at which the base would keep it. Tokens of equal need follow in the
        order of the scores at this capacity.
        """
        exists, count = find_existing(view), view.segment.end
        last = len(self._capacities) * count
        need = torch.full(exists.shape, last, device=exists.device)
        for number in reversed(range(len(self._capacities))):
            rank = self.rank(view, number).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
            need = torch.where(rank < self._capacities[number], number * count + rank, need)
        return need.masked_fill(~exists, last).argsort(dim=1, stable=True)

    def _close_all(self) -> None:
        """End all contexts, and drop contexts without a future."""
        for context in self._open.values():
            if context.utility:
                self._close(context)
        self._open = {}

    def _close(self, context: Context) -> None:
        """Add the shares and losses of a context in each sequence."""
        utility = torch.stack([context.utility[layer] for layer in range(self.spec.layers)])
        ranked = utility.gather(2, torch.stack(context.order)).unflatten(1, (-1, self.spec.heads))
        for sequence, count in enumerate(context.counts):
            self._add(ranked[:, sequence, :, :count].flip(2).double().cpu().numpy())

    def _add(self, utility: Floats) -> None:
        """Add a sequence's utilities [L, H, N], the least needed tokens first."""
        count, protected = utility.shape[2], find_min_capacity(self.base, self.spec)
        most = count - max(round(self.floor * count), protected)
        if most < 1:
            return  # no head can discard a token
        losses = find_marginal_losses(utility[:, :, : count - protected])[:, :, :most]
        self.sums["pruned"] += torch.from_numpy(discard(losses, count, self.scope))
        self.sums["losses"] += torch.from_numpy(sum_percents(utility))
        self._measured += 1


def list_contexts(spec: ModelSpec) -> dict[int, int]:
    """Return the last segment of each context and the last segment of its future.

    Scales: all cached scales except the last, and the last two scales. Images by tokens: the condition and the first
    half of the lines, and the other lines. Texts, which may end at any length: the prompt and as many tokens after it,
    then both together and as many tokens after them, and so on.
    """
    last = len(spec.segments) - 1
    if spec.family == "next-scale":
        return {max(last - 2, 0): last}
    if not spec.writes_text:
        return {last // 2: last}
    contexts, start = {}, 0
    while start < last:
        end = next((s.index for s in spec.segments[start + 1 :] if s.end >= 2 * spec.ends[start]), last)
        contexts[start] = start = end
    return contexts
