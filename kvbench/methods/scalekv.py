"""ScaleKV: large capacities for drafter layers, small capacities for refiners (NeurIPS 2025, arXiv:2505.19602)."""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.files import parse_json, read_text
from kvbench.core.segments import Family, ModelSpec, Segment
from kvbench.methods.shared.calibration import Artifact, Observer, require_artifact
from kvbench.methods.shared.capacities import Ints, fill_gaps, shrink_early
from kvbench.methods.shared.limits import SHARE, Limit, set_limits
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import (
    Pool,
    average_attention,
    check_window,
    choose_window,
    find_slots,
    find_valid_queries,
    fit_window,
    merge_branches,
    smooth_outside,
)
from kvbench.methods.shared.view import View

MIN_REFINER_SHARE = Fraction(200, 650)
"""Minimum share of the mean budget for a refiner, consistent with all ten published (Max, Min) pairs."""


@dataclass
class AttentionSelectivity(Observer):
    """Calibration of ASI [L, K]: attention to the current map times attention to the history's strongest tokens.

    For each head, prompt and scale: mean over queries of the attention to the current scale, times mean over queries of
    the attention to the K' most attended history tokens; then the mean over heads. Scale 0 has no history and gets 0.

    Attributes:
        strongest: K' as a share of the history.
        queries: number of evenly spaced queries that represent all.
    """

    strongest: float = 0.05
    queries: int = 64

    kind: ClassVar[str] = "attention_selectivity"

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shape [L, K] of `asi`."""
        return {"asi": (spec.layers, len(spec.segments))}

    def accumulate(self, view: View) -> None:
        """Add the mean selectivity index over the segment's heads."""
        segment = view.segment
        if segment.start == 0:
            return
        scores = view.scores(choose_window("uniform", segment, self.queries))
        attention = self.select_conditional(scores.softmax(-1).flatten(1, 2))
        cached = attention.shape[-1] - segment.length
        history, current = attention.split((cached, segment.length), -1)
        strongest = max(1, round(self.strongest * segment.start))
        top = history.topk(min(strongest, cached), -1).values  # padded prompts have fewer tokens
        index = current.sum(-1).mean(-1) * top.sum(-1).mean(-1)
        self.sums["asi"][view.layer, segment.index] += index.mean(1).sum()


@dataclass
class ScaleKV(Scored):
    """Give large capacities to a few drafters and the rest to refiners; score tokens by a window on the current map.

    A (layer, scale) pair with a low attention selectivity index is a drafter. Budgets follow the rule behind the
    published ones (`share_capacity`), with mean B / T over layers at each scale. Each head of a layer keeps the window
    and the tokens that its queries attend to most.

    Differs from the paper in: calibration settings that the paper does not give (K', sampled queries, number of
    drafters) are options. Budgets follow the released tables, which do not match the paper's linear decay. In the
    authors' program drafters grow before refiners shrink, which exceeds the budget by up to 25 % between layers; with
    `strict`, as many of the deepest layers as needed shrink one scale earlier. The program also gives a new drafter
    more than its tokens; here other layers get the rest (`fill_up`). A capacity of less than twice the window shrinks
    the window. The paper protects no sinks.

    Attributes:
        drafters: share of the (layer, scale) pairs with a budget that are drafters (published: 9 of 160, 15 of 200).
        strongest: K' of the calibration, as a share of the history.
        queries: number of evenly spaced queries that represent all in the calibration.
        budgets: the authors' budget file (JSON), instead of calibration and rule.
        released_queries: score as the released code does: sum of raw logits of the queries before bias, norm, learned
            scale and rotation, instead of the paper's attention.
        window: tokens of the window, a square number.
        pool: kind of smoothing; all released scripts take the maximum, the paper averages.
        kernel: slots of the smoothing kernel, odd; 1 for none.
        strict: keep the budget after each layer; false for the published order, with a measured peak.
    """

    drafters: float = 0.06
    strongest: float = 0.05
    queries: int = 64
    budgets: str | None = None
    released_queries: bool = False
    window: int = 16
    pool: Pool = "max"
    kernel: int = 5
    strict: bool = True

    recordable: ClassVar[bool] = True
    revision: ClassVar[int] = 2  # before, smoothing included missing slots
    families: ClassVar[tuple[Family, ...]] = ("next-scale",)
    limits = set_limits(drafters=SHARE, strongest=SHARE, queries=Limit(1))

    def needs(self) -> Observer | Path:
        """Return the calibration of ASI, or the budget file that replaces it."""
        if self.budgets is not None:
            return Path(self.budgets)
        return AttentionSelectivity(self.strongest, self.queries)

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse an invalid window, a budget file of another model or budget, and what `Scored` refuses."""
        super().check(spec, budget)
        check_window(self.window, self.kernel, max_size=max(spec.lengths))
        if self.budgets is not None:
            read_capacities(Path(self.budgets), spec, budget)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Compute the capacity of each layer after each scale."""
        super().prepare(spec, budget, artifact)
        total = budget.tokens // spec.heads
        if self.budgets is not None:
            capacities = read_capacities(Path(self.budgets), spec, budget)
        else:
            asi = require_artifact(artifact, "method.budgets: give a budget file, or")["asi"]
            flags = choose_drafters(asi, spec, budget.head_tokens, self.drafters)
            capacities = fill_up(share_capacity(spec, budget.head_tokens, flags), spec, total)
        if self.strict:
            capacities = shrink_early(capacities, spec.lengths, total)
        if self.strict and self.budgets is None:
            capacities = fill_gaps(capacities, spec.lengths, total)
        self.capacities = capacities

    def share(self, layer: int, segment: Segment) -> int:
        """Return the capacity of each head of the layer after the scale."""
        return int(self.capacities[segment.index, layer])

    def score(self, view: View) -> Tensor:
        """Return the smoothed attention from the window's queries, infinity inside it: float32 [rows, slots]."""
        size = fit_window(self.window, self.share(view.layer, view.segment))
        chosen = choose_window("grid", view.segment, size)
        inside = find_slots(view, chosen)
        if self.released_queries:
            received = view.logits(chosen, raw_queries=True)
        else:
            scores, queries = view.scores(chosen), find_valid_queries(view, chosen)
            received = average_attention(scores, inside, softmax="all", group="mean", asking=queries)
        merged = merge_branches(received, self.branch_mode, self.spec.branches)  # before pooling
        smoothed = smooth_outside(
            merged, inside, self.pool, self.kernel, exists=view.exists, spread_blank=self.released_queries
        )
        return smoothed.masked_fill(inside, torch.inf)


def choose_drafters(asi: Tensor, spec: ModelSpec, capacity: int, share: float) -> NDArray[np.bool_]:
    """Choose the drafters at each scale, bool [K, L]: the lowest z-scores of ASI across the layers of a scale.

    ASI is float64 [L, K]. Only scales after more than `capacity` tokens, the mean per head, have drafters: a share of
    the (layer, scale) pairs of these scales.
    """
    values = asi.T.numpy()
    z = (values - values.mean(1, keepdims=True)) / np.maximum(values.std(1, keepdims=True), 1e-12)
    eligible = [k for k in range(1, len(spec.segments)) if spec.ends[k - 1] > capacity]
    flags = np.zeros(values.shape, bool)
    order = np.argsort(z[eligible], axis=None, kind="stable")[: round(share * len(eligible) * spec.layers)]
    scale, layer = np.divmod(order, spec.layers)
    flags[np.array(eligible, int)[scale], layer] = True
    return flags


def share_capacity(spec: ModelSpec, capacity: int, drafts: NDArray[np.bool_]) -> Ints:
    """Share the budget among layers: tokens per head of each layer after each cached scale, int64 [K - 1, L].

    Drafters of the next scale (`drafts`, bool [K, L], by scale) get Max, and refiners get Min, with mean `capacity`
    over layers. Max is the largest number that a drafter can fill (the last Max plus the new scale) and for which Min
    is whole and at least `MIN_REFINER_SHARE` of the mean. This reproduces every published pair of the 10 % budgets.
    """
    layers, floor = spec.layers, round(MIN_REFINER_SHARE * capacity)
    result = np.empty((len(spec.segments) - 1, layers), np.int64)
    largest = 0
    for k, length in enumerate(spec.lengths[:-1]):
        if spec.ends[k] <= capacity:
            largest = spec.ends[k]
            result[k] = largest
            continue
        flags = drafts[k + 1]
        few, total = int(flags.sum()), layers * capacity
        others, limit = max(layers - few, 1), capacity
        if 0 < few < layers:
            limit = min(largest + length, (total - others * floor) // few)
        largest = next(m for m in range(max(limit, capacity), -1, -1) if (total - few * m) % others == 0)
        result[k] = np.where(flags, largest, (total - few * largest) // others)
    return result


def fill_up(capacity: Ints, spec: ModelSpec, total: int) -> Ints:
    """Give capacity that drafters cannot fill, and the remainder of the mean, to other layers: int64 [K - 1, L].

    After a scale, a layer holds at most its earlier tokens plus the scale's: a new drafter stays below Max. The rest of
    `total`, the sum over layers of the tokens of one head, is shared evenly among layers that can hold more; the first
    of them get the remainder. Capacities, int64 [K - 1, L], are tokens per head after each cached scale.
    """
    filled = np.empty_like(capacity)
    before = np.zeros(spec.layers, np.int64)
    for k, length in enumerate(spec.lengths[:-1]):
        reach = before + length
        tokens = np.minimum(capacity[k], reach)
        while (spare := total - int(tokens.sum())) > 0 and (able := np.flatnonzero(tokens < reach)).size:
            takers = able[:spare]
            tokens[takers] = np.minimum(tokens[takers] + max(spare // able.size, 1), reach[takers])
        filled[k] = before = tokens
    return filled


def read_capacities(path: Path, spec: ModelSpec, budget: Budget) -> Ints:
    """Read the authors' budget file: tokens per head of each layer after each cached scale, int64 [K - 1, L].

    The file contains {"Scale j": {"Block l": 0 or 1, "Max": m, "Min": n}}, which applies after scale j - 2 (from 0).

    Raises:
        ValueError: unreadable, another number of layers or scales, or more tokens than the budget.
    """
    try:
        content = parse_json(read_text(path))
        scales = len(spec.segments)
        capacities = np.array([[end] * spec.layers for end in spec.ends[:-1]], np.int64)
        for name, entry in content.items():
            scale = int(name.removeprefix("Scale "))
            flags = np.array([entry.pop(f"Block {layer}") for layer in range(spec.layers)], bool)
            capacities[scale - 2] = np.where(flags, entry["Max"], entry["Min"])
            if f"Block {spec.layers}" in entry or not 2 <= scale <= scales:
                raise ValueError(f"it is not for {spec.layers} layers and {scales} scales")
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"method.budgets={path}: not a budget file of {spec.name} ({error})") from None
    tokens = int(capacities.sum(1).max()) * spec.heads
    if tokens > budget.capacity:
        needed = Fraction(tokens, spec.all_heads)
        if budget.bytes is not None:
            needed = tokens / budget.capacity * budget.bytes
        raise ValueError(
            f"method.budgets={path}: its layers hold {tokens / spec.all_heads:g} tokens per head, the budget is "
            f"{float(budget.per_head):g}; set budget={ceil(needed)}"
        )
    return capacities
