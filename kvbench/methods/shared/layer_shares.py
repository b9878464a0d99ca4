"""Capacities of layers in proportion to statistics of their attention, calibrated or measured as a sequence grows."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, Segment
from kvbench.methods.shared.calibration import Artifact, Observer, require_artifact
from kvbench.methods.shared.capacities import Floats, Ints, fill_gaps, fill_groups, share_layer, shrink_early
from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.select import choose_best, count_sinks
from kvbench.methods.shared.view import View


@dataclass
class LayerStatistics(Observer):
    """Calibration of the statistics `layers`, [L, K, n], that determine shares of layers; a subclass writes `measure`.

    Attributes:
        count: n, the number of statistics of a layer after a segment.
    """

    count: ClassVar[int] = 1

    def measure(self, view: View) -> Tensor:
        """Return the statistics of a layer for each sequence, floating-point [sequences, n]."""
        raise NotImplementedError

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shape [L, K, n] of `layers`."""
        return {"layers": (spec.layers, len(spec.segments), self.count)}

    def accumulate(self, view: View) -> None:
        """Add the statistics of the conditional sequences."""
        rows = self.measure(view)
        conditional = rows[: len(rows) // self.spec.branches].sum(0)
        self.sums["layers"][view.layer, view.segment.index] += conditional.double().cpu()


@dataclass(kw_only=True)
class LayerShares(Scored):
    """Share B among layers by what `observer` measures; a subclass writes `observer` and `weigh`.

    `calibrated` shares are known in advance for each segment and never exceed B. `previous` shares follow from each
    sequence's previous segment. After the first segment later layers are not measured yet: a layer takes its share of B
    among the layers up to it, as in the cascade of CAKE, which is more than its final share. The peak then exceeds B
    and is measured.

    Attributes:
        preference: see above.
    """

    preference: Literal["calibrated", "previous"] = "calibrated"

    revision: ClassVar[int] = 2  # before, capacities were for the longest prompt of texts
    uniform_capacity = False  # layers have shares of their own
    heads_independent = False  # layers are measured over all heads

    def __post_init__(self) -> None:
        """Set `strict` if B is never exceeded."""
        self.strict = self.preference == "calibrated"

    @cached_property
    def observer(self) -> LayerStatistics:
        """Observer that measures the statistics of each layer."""
        raise NotImplementedError

    def weigh(self, statistics: Floats) -> Floats:
        """Return a weight for each layer, float64 [..., L] in (0, 1], from statistics [..., L, n]."""
        raise NotImplementedError

    def divide(self, weights: Floats, tokens: int, length: int, reach: Ints) -> Ints:
        """Divide tokens of all heads among layers, by weights [layers]: int64 [layers], the capacity of each head.

        There are `length` tokens so far; a head of each layer can hold `reach`, int64 [layers], at most.
        """
        del length
        sizes = np.full(len(weights), self.spec.heads)
        return fill_groups(tokens, weights, sizes, reach, self.min_tokens)

    @property
    def graph_obstacle(self) -> str | None:
        """Shares that are measured as a sequence grows are computed on the host."""
        if self.preference == "previous":
            return "shares of layers are measured and computed on the host"
        return super().graph_obstacle

    @property
    def min_tokens(self) -> int:
        """Smallest capacity of any head."""
        return max(1, count_sinks(self.spec, self.sinks, self.leading))

    def needs(self) -> Observer | None:
        """Return the calibration if shares are calibrated, else None."""
        return self.observer if self.preference == "calibrated" else None

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Compute the capacity of each layer after each segment, or drop earlier measurements."""
        super().prepare(spec, budget, artifact)
        self._now: list[Tensor] = []
        self._held: list[Ints] = []
        if self.preference == "previous":
            self.observer.prepare(spec)
            return
        layers = require_artifact(artifact, "method.preference=calibrated:")["layers"]
        weights, held = self.weigh(layers.numpy().swapaxes(0, 1)), []
        before = np.zeros(spec.layers, np.int64)
        for segment in spec.segments[:-1]:
            reach = before + segment.length
            before = self.divide(weights[segment.index], budget.tokens, segment.end, reach)
            held.append(before * spec.heads)
        arriving = [length * spec.heads for length in spec.lengths]
        capacities = np.array(held)
        if self.strict:
            capacities = fill_gaps(shrink_early(capacities, arriving, budget.tokens), arriving, budget.tokens)
        self._assigned = [[share_layer(int(tokens), spec.heads) for tokens in row] for row in capacities]

    def capacity(self, layer: int, segment: Segment) -> int | tuple[int, ...] | None:
        """Return the share of a layer's heads; None if it is measured."""
        return None if self.preference == "previous" else super().capacity(layer, segment)

    def observe(self, view: View) -> None:
        """Measure the layer if shares are not calibrated, and compute its capacity in each sequence."""
        super().observe(view)
        if self.preference == "calibrated":
            return
        if view.layer == 0:
            if view.segment.index == 0:
                self._held = []
            elif len(self._now) == self.spec.layers:
                self._held = self._divide_each(view)
            self._now = []
        self._now.append(self.observer.measure(view))
        if view.segment.index == 0:
            self._held = self._divide_each(view)

    def select_slots(self, view: View, ranked: Tensor) -> Tensor:
        """Select each row's best slots up to its layer's capacity, bool [rows, slots]."""
        if self.preference == "calibrated":
            return super().select_slots(view, ranked)
        capacity = torch.tensor([int(held[view.layer]) for held in self._held])
        rows = capacity.repeat_interleave(view.heads).to(ranked.device, non_blocking=True)
        if view.padding_charge is not None:
            rows = (rows - view.padding_charge).clamp(min=1)
        return choose_best(ranked, rows)

    def _divide_each(self, view: View) -> list[Ints]:
        """Divide B among the layers measured so far: for each sequence int64 [layers], the capacity of each head."""
        sequences: Floats = torch.stack(self._now, 1).double().cpu().numpy()  # [sequences, layers, n]
        plans, segment = self.list_plans(view), view.segment.index
        plans *= len(sequences) // len(plans)
        return [plan._divide_whole(layers, segment) for plan, layers in zip(plans, sequences, strict=True)]

    def _divide_whole(self, statistics: Floats, segment: int) -> Ints:
        """Divide B among the measured layers of a sequence: int64 [layers], the capacity of each head."""
        weights, length = self.weigh(statistics), self.spec.ends[segment]
        return self.divide(weights, self.budget.tokens, length, np.full(len(weights), length))
