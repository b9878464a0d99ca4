"""Prediction of a scale's keys and values from the decoded scale before, in the same head."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec
from kvbench.engine.coding.formats import CodebookTensors, PlaneFormat
from kvbench.engine.coding.planes import Placement
from kvbench.engine.coding.scale_residuals import SIDES, interpolate, list_parents
from kvbench.engine.schedule import Schedule
from kvbench.kernels.layout import Layout
from kvbench.kernels.planes import list_slots, rotate, unrotate


class Link(NamedTuple):
    """Predicted slots of one scale.

    Attributes:
        slots: int64 [n].
        parents: int64 [n, 4], slots of the scale before.
        weights: float32 [n, 4], of the parents in the prediction of keys, and of values.
    """

    slots: Tensor
    parents: Tensor
    weights: tuple[Tensor, Tensor]


class Links(NamedTuple):
    """Order in which a layer's slots are decoded.

    Attributes:
        plain: int64 [n], slots whose keys are stored in 16 bits.
        turns: complex64 [slots, D/2], rotation of each slot's key; None without one.
        scales: predicted slots, from one scale to the next.
    """

    plain: Tensor
    turns: Tensor | None
    scales: tuple[Link, ...]

    def rebuild(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add to all differences what predicts them, in place: keys before rotation, and values.

        Args:
            keys: float32 [sequences, slots, D], rotated in 16 bits and before rotation elsewhere.
            values: float32 [sequences, slots, D].
        """
        if self.turns is not None:
            keys[:, self.plain] = unrotate(keys[:, self.plain], self.turns[self.plain])
        for link in self.scales:
            for x, weights in zip((keys, values), link.weights, strict=True):
                x[:, link.slots] += interpolate(x, link.parents, weights)
        return keys, values

    def rotate(self, keys: Tensor) -> Tensor:
        """Rotate keys [sequences, slots, D] as they are read."""
        return keys if self.turns is None else rotate(keys, self.turns)


class Predictor:
    """Predictions of all layers under a static method.

    A head's scale is predicted only if the head holds the whole scale before for as long as it holds any token of the
    scale. Otherwise the numbers themselves are stored.

    Attributes:
        books: codebooks of each layer, head and scale: of differences where it is predicted.

    Args:
        spec: the model's shapes.
        books: calibration of `ScaleResiduals`.
        rotation: complex64 [positions, D/2]; None without a rotation.
        wanted: bool [L, H, K - 1], scales that the method predicts; None for all that can be predicted.

    Raises:
        ValueError: the model has no scales.
    """

    def __init__(
        self, spec: ModelSpec, books: CodebookTensors, rotation: Tensor | None, wanted: Tensor | None = None
    ) -> None:
        if spec.family != "next-scale":
            raise ValueError(
                f"storage.centroids=scale: {spec.name} has no scales; set storage.centroids=null"
            )
        self._spec, self._rotation, self._calibrated, self._wanted = spec, rotation, books, wanted
        self.books: Mapping[str, Tensor] = {}
        self._schedule: Schedule | None = None
        device = books["keys_factor"].device
        pairs = [list_parents(before, segment) for before, segment in pairwise(spec.segments[:-1])]
        self._parents = [None, *(tuple(part.to(device) for part in pair) for pair in pairs)]
        lengths = torch.tensor(spec.lengths, device=device)
        self._segment = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
        self._known: dict[tuple[int, int], tuple[Placement, Links]] = {}

    def follow(self, schedule: Schedule) -> None:
        """Choose the predicted scales of a method's schedule, and their codebooks.

        Raises:
            ValueError: a head wants to predict a scale from a scale before that it does not hold as long.
        """
        if schedule is self._schedule:
            return
        self._schedule = schedule
        self._known.clear()
        given = self._calibrated
        chosen = find_predictable(self._spec, schedule)
        if self._wanted is not None:
            if len(missing := (self._wanted & ~chosen).nonzero()):
                layer, head, index = missing[0].tolist()
                raise ValueError(
                    f"predicted precision: head {head} of layer {layer} drops tokens of scale {index - 1}, which scale "
                    f"{index} needs"
                )
            chosen = self._wanted
        chosen = chosen.to(given["keys_factor"].device)
        self._factors = [given[f"{side}_factor"] * chosen for side in SIDES]
        self._chosen = (self._factors[0] != 0) | (self._factors[1] != 0)
        self._any = self._chosen.any(1).tolist()
        self.books = {
            name: torch.where((factors != 0)[..., None, None], given[f"{name}_residual"], book)
            for side, factors in zip(SIDES, self._factors, strict=True)
            for name, book in given.items()
            if name.startswith(side) and f"{name}_residual" in given
        }

    def predicts(self, layer: int, index: int) -> bool:
        """Return whether any head of a layer predicts a scale."""
        return bool(self._any[layer][index])

    def link(self, layer: int, layout: Layout, placement: Placement, formats: Sequence[PlaneFormat]) -> Links:
        """Return the order in which a layer's slots are decoded; layouts of a schedule are read once."""
        key = layer, id(placement)
        if key not in self._known:
            self._known[key] = placement, self._link(layer, layout, placement, formats)
        return self._known[key][1]

    def _link(
        self, layer: int, layout: Layout, placement: Placement, formats: Sequence[PlaneFormat]
    ) -> Links:
        rows, positions = list_slots(layout)
        table, coded = self._find_slots(layout), placement.plane[:-1] != 0
        rotates = self._rotation is not None and layer not in self._spec.unrotated
        turns = self._rotation[positions] if self._rotation is not None and rotates else None
        scales, heads = [], rows % self._spec.heads
        for segment, pair in zip(self._spec.segments[:-1], self._parents, strict=True):
            if pair is None:
                continue
            mine = (
                coded
                & (self._segment[positions] == segment.index)
                & self._chosen[layer, heads, segment.index]
            )
            slots = mine.nonzero().flatten()
            if len(slots):
                token, before = positions[slots] - segment.start, self._spec.segments[segment.index - 1]
                parents = table[rows[slots, None], before.start + pair[0][token]]
                factors = [part[layer, heads[slots], segment.index, None] for part in self._factors]
                weights = (pair[1][token] * factors[0], pair[1][token] * factors[1])
                scales.append(Link(slots, parents, weights))
        plain = [
            plane.slots for fmt, plane in zip(formats, placement.planes, strict=True) if fmt.keys == "plain"
        ]
        return Links(torch.cat(plain), turns, tuple(scales))

    def predict(self, layer: int, index: int, layout: Layout, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Return the predictions of a scale, keys before rotation and values: float32 [batch, rows, tokens, D].

        They are 0 where a scale is not predicted.

        Args:
            layer: its index.
            index: of the scale.
            layout: of the layer before the scale is stored.
            keys: decoded keys before rotation, float32 [batch, slots, D].
            values: decoded values.

        Raises:
            ValueError: a head does not hold the scale before.
        """
        pair, rows = self._parents[index], len(layout.counts)
        assert pair is not None, "the first scale has no scale before"
        before, heads = (
            self._spec.segments[index - 1],
            torch.arange(rows, device=keys.device) % self._spec.heads,
        )
        slots = self._find_slots(layout)[:, before.start + pair[0]]
        chosen = self._chosen[layer, heads, index]
        if bool((slots[chosen] < 0).any()):
            raise ValueError(
                f"storage.centroids=scale: a head dropped tokens of scale {index - 1}, which scale {index} needs"
            )
        slots = slots.where(chosen[:, None, None], 0)
        found = []
        for x, factors in zip((keys, values), self._factors, strict=True):
            weights = pair[1] * factors[layer, heads, index, None, None]
            found.append(interpolate(x, slots, weights * chosen[:, None, None]))
        return found

    def _find_slots(self, layout: Layout) -> Tensor:
        """Return the slot of each row's positions, int64 [rows, positions]; -1 where there is none."""
        rows, positions = list_slots(layout)
        table = positions.new_full((len(layout.counts), self._spec.segments[-1].end), -1)
        table[rows, positions] = torch.arange(len(rows), device=rows.device)
        return table


def find_predictable(spec: ModelSpec, schedule: Schedule) -> Tensor:
    """Return which scales may be predicted, bool [L, H, K - 1].

    Those whose scale before is held as a whole for as long as any of their own tokens.

    Args:
        spec: the model's shapes.
        schedule: of a static method.
    """
    lengths = torch.tensor(spec.lengths)
    segments = torch.arange(len(lengths)).repeat_interleave(lengths)
    count = len(lengths) - 1
    chosen = torch.zeros(spec.layers, spec.heads, count, dtype=torch.bool)
    for layer in range(spec.layers):
        held = torch.zeros(count, spec.heads, count, dtype=torch.int64)  # after each segment
        for index in range(count):
            positions = schedule[layer, index].layout.positions.cpu()
            row, place = (positions >= 0).nonzero(as_tuple=True)
            held[index].view(-1).index_add_(
                0, row * count + segments[positions[row, place]], torch.ones_like(row)
            )
        for index in range(1, count):
            own, before = held[index:, :, index] > 0, held[index:, :, index - 1] == spec.lengths[index - 1]
            chosen[layer, :, index] = own[0] & (before | ~own).all(0)
    return chosen
