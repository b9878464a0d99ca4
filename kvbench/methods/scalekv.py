"""ScaleKV: layers that draft need history, layers that refine do not (NeurIPS 2025, arXiv:2505.19602)."""

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
from kvbench.core.files import parse_json
from kvbench.core.segments import Family, ModelSpec, Segment
from kvbench.methods.shared.base import SHARE, Artifact, Limit, Observer, require_artifact, set_limits
from kvbench.methods.shared.capacities import Ints, fill_gaps, shrink_early
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import (
    Pool,
    average_attention,
    check_window,
    choose_window,
    find_slots,
    find_valid_queries,
    fit_window,
    smooth_outside,
)
from kvbench.methods.shared.view import View

FLOOR = Fraction(200, 650)
"""Least share of the mean budget that a refiner keeps; what all ten published (Max, Min) pairs agree with."""


@dataclass
class AttentionSelectivity(Observer):
    """Calibrates ASI [L, K]: attention to the current map times attention to the history's strongest tokens.

    For every head, prompt and scale: mean over queries of the mass on the current scale, times mean over queries of the
    mass on the K' most attended history tokens; then the mean over heads. Scale 0, which has no history, stays 0.

    Attributes:
        strongest: K' as a share of the history.
        queries: evenly spaced queries that stand for all.
    """

    strongest: float = 0.05
    queries: int = 64

    kind: ClassVar[str] = "attention_selectivity"

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return [L, K] of `asi`."""
        return {"asi": (spec.layers, len(spec.segments))}

    def accumulate(self, view: View) -> None:
        """Add the segment's index, a mean over heads."""
        segment = view.segment
        if segment.start == 0:
            return
        scores = view.scores(choose_window("uniform", segment, self.queries))
        attention = self.select_conditional(scores.softmax(-1).flatten(1, 2))
        cached = attention.shape[-1] - segment.length
        history, current = attention.split((cached, segment.length), -1)
        strongest = max(1, round(self.strongest * segment.start))
        top = history.topk(min(strongest, cached), -1).values  # of padded prompts less is cached
        index = current.sum(-1).mean(-1) * top.sum(-1).mean(-1)
        self.sums["asi"][view.layer, segment.index] += index.mean(1).sum()


@dataclass
class ScaleKV(Scored):
    """Large budgets for the few drafters, the rest for the refiners; tokens chosen by a window on the current map.

    A (layer, scale) with a low attention selectivity index drafts. Budgets follow the rule behind the published ones
    (`share_capacity`): their mean over layers is B / T at every scale. Within a layer every head keeps the
    window and the tokens that its queries attend to most.

    Differs from the paper in: calibration settings that it does not give (K', sampled queries, number of drafters) are
    options; the released tables show another budget rule than the paper's linear decay, and we follow the tables. In
    the authors' program drafters grow before refiners shrink, which exceeds the budget by up to 25 % between layers;
    with `strict` as many of the deepest layers as needed shrink one scale earlier. They also give a layer that drafts
    for the first time more than it has tokens for; here the others get the rest (`fill_up`). A capacity of less
    than twice the window shrinks the window. The paper protects no sinks.

    Attributes:
        drafters: share of the (layer, scale) pairs with a budget that draft (published: 9 of 160 and 15 of 200).
        strongest: K' of the calibration, as a share of the history.
        queries: evenly spaced queries that stand for all in the calibration.
        budgets: the authors' budget file (JSON) in place of calibration and rule.
        released_queries: score as the released code does: sum of raw logits of the queries before bias, norm, learned
            scale and rotation, instead of the paper's attention of the real ones.
        window: tokens of the window, a square number.
        pool: kind of smoothing; all released scripts take the maximum, the paper averages.
        kernel: slots that smoothing takes together, odd; 1 for none.
        strict: keep the budget after every layer; false for the published order, whose peak is then measured.
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

    revision: ClassVar[int] = 2  # slots that a row has not were its slots' neighbours
    families: ClassVar[tuple[Family, ...]] = ("next-scale",)
    limits = set_limits(drafters=SHARE, strongest=SHARE, queries=Limit(1))

    def needs(self) -> Observer | Path:
        """Return the calibration of ASI, or the budget file that stands in its place."""
        if self.budgets is not None:
            return Path(self.budgets)
        return AttentionSelectivity(self.strongest, self.queries)

    def check(self, spec: ModelSpec, budget: Budget) -> None:
        """Refuse a window that cannot be, a budget file of another model or budget, and what `Scored` refuses."""
        super().check(spec, budget)
        check_window(self.window, self.kernel, max_size=max(spec.lengths))
        if self.budgets is not None:
            read_capacities(Path(self.budgets), spec, budget)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Work out what every layer may hold after every scale."""
        super().prepare(spec, budget, artifact)
        total = budget.tokens // spec.heads
        if self.budgets is not None:
            held = read_capacities(Path(self.budgets), spec, budget)
            self.capacities = shrink_early(held, spec.lengths, total) if self.strict else held
        else:
            asi = require_artifact(artifact, "method.budgets: give a budget file, or")["asi"]
            flags = choose_drafters(asi, spec, budget.head_tokens, self.drafters)
            held = fill_up(share_capacity(spec, budget.head_tokens, flags), spec, total)
            if self.strict:
                held = fill_gaps(shrink_early(held, spec.lengths, total), spec.lengths, total)
            self.capacities = held

    def share(self, layer: int, segment: Segment) -> int:
        """Return what the layer may hold in every head after the scale."""
        return int(self.capacities[segment.index, layer])

    def score(self, view: View) -> Tensor:
        """Return the smoothed attention from the window's queries, infinity inside it: float32 [rows, slots]."""
        size = fit_window(self.window, self.share(view.layer, view.segment))
        chosen = choose_window("grid", view.segment, size)
        inside = find_slots(view, chosen)
        if self.released_queries:
            received = view.logits(chosen, raw_queries=True)
        else:
            scores, asking = view.scores(chosen), find_valid_queries(view, chosen)
            received = average_attention(scores, inside, softmax="all", group="mean", asking=asking)
        united = self.merge_branches(received)  # before neighbours are mixed
        smoothed = smooth_outside(
            united,
            inside,
            self.pool,
            self.kernel,
            exists=self.valid_slots(view),
            spread_blank=self.released_queries,
        )
        return smoothed.masked_fill(inside, torch.inf)


def choose_drafters(asi: Tensor, spec: ModelSpec, capacity: int, share: float) -> NDArray[np.bool_]:
    """Choose the layers that draft at each scale, bool [K, L]: the lowest z-scores of ASI across a scale's layers.

    Args:
        asi: float64 [L, K].
        spec: the model's shapes.
        capacity: mean tokens per head; layers can draft only at scales before which more tokens than this were made.
        share: how many of those (layer, scale) pairs draft.
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
    """Share the budget among the layers: tokens per head of each after every cached scale, int64 [K - 1, L].

    Drafters of the next scale may hold Max, the others Min, with a mean of `capacity` over the layers. Max is the
    largest number up to what a drafter can hold (the last Max and the new scale) that makes Min whole and at least
    `FLOOR` of the mean. This reproduces every published pair of the 10 % budgets.

    Args:
        spec: the model's shapes.
        capacity: mean tokens per head.
        drafts: bool [K, L], which layers draft at which scale.
    """
    layers, floor = spec.layers, round(FLOOR * capacity)
    result = np.empty((len(spec.segments) - 1, layers), np.int64)
    largest = 0
    for k, length in enumerate(spec.lengths[:-1]):
        if spec.ends[k] <= capacity:
            largest = spec.ends[k]
            result[k] = largest
            continue
        flags = drafts[k + 1]
        few, total = int(flags.sum()), layers * capacity
        limit = (
            min(largest + length, (total - (layers - few) * floor) // few) if 0 < few < layers else capacity
        )
        largest = next(
            m for m in range(max(limit, capacity), -1, -1) if (total - few * m) % max(layers - few, 1) == 0
        )
        result[k] = np.where(flags, largest, (total - few * largest) // max(layers - few, 1))
    return result


def fill_up(capacity: Ints, spec: ModelSpec, total: int) -> Ints:
    """Give what drafters cannot hold to the others, and what a mean rounded down left: int64 [K - 1, L].

    No layer can hold more after a scale than it held before and the scale's tokens: one that drafts for the first time
    stays below Max. What is then left of `total` is shared evenly among the layers that can hold more, the first ones
    before the others where it does not divide.

    Args:
        capacity: int64 [K - 1, L], tokens per head of each layer after every cached scale.
        spec: the model's shapes.
        total: tokens that one head of every layer may hold together.
    """
    held = np.empty_like(capacity)
    before = np.zeros(spec.layers, np.int64)
    for k, length in enumerate(spec.lengths[:-1]):
        reach = before + length
        held[k] = np.minimum(capacity[k], reach)
        while (spare := total - int(held[k].sum())) > 0 and (able := np.flatnonzero(held[k] < reach)).size:
            takers = able[:spare]
            held[k, takers] = np.minimum(held[k, takers] + max(spare // able.size, 1), reach[takers])
        before = held[k]
    return held


def read_capacities(path: Path, spec: ModelSpec, budget: Budget) -> Ints:
    """Read a budget file of the authors: tokens per head of each layer after every cached scale, int64 [K - 1, L].

    It holds {"Scale j": {"Block l": 0 or 1, "Max": m, "Min": n}}, which applies after scale j - 2 (from 0).

    Raises:
        ValueError: unreadable, another number of layers or scales, or more tokens than the budget.
    """
    try:
        content = parse_json(path.read_text())
        scales = len(spec.segments)
        held = np.array([[end] * spec.layers for end in spec.ends[:-1]], np.int64)
        for name, entry in content.items():
            flags = np.array([entry.pop(f"Block {layer}") for layer in range(spec.layers)], bool)
            held[int(name.removeprefix("Scale ")) - 2] = np.where(flags, entry["Max"], entry["Min"])
            if f"Block {spec.layers}" in entry or not 2 <= int(name.removeprefix("Scale ")) <= scales:
                raise ValueError(f"it is not for {spec.layers} layers and {scales} scales")
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"method.budgets={path}: not a budget file of {spec.name} ({error})") from None
    held_tokens = int(held.sum(1).max()) * spec.heads
    if held_tokens > budget.capacity:
        needed = (
            Fraction(held_tokens, spec.all_heads)
            if budget.bytes is None
            else held_tokens / budget.capacity * budget.bytes
        )
        raise ValueError(
            f"method.budgets={path}: its layers hold {held_tokens / spec.all_heads:g} tokens per head, the budget is "
            f"{float(budget.per_head):g}; set budget={ceil(needed)}"
        )
    return held
