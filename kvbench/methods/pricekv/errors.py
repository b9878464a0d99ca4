"""Error of attention's output without some of its past, measured for every set of past segments at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.pricekv.sources import list_sources
from kvbench.methods.shared.base import Artifact, Observer
from kvbench.methods.shared.select import choose_window, softmax_seen
from kvbench.methods.shared.view import View

Importance = Literal["output", "mass"]
Slots = tuple[slice, Tensor | None]
"""Slots, and which of them a row has, bool [rows, slots]; None for all."""


@dataclass
class SubsetError(Observer):
    """Calibrates the error of each head's attention for each set of past blocks that it could be left with.

    The tensor `error` is float64 [L, H, sets]: of each segment but the first, one after the other, the error of its
    queries for every set of its sources (`sources.list_sources`), when those are all that is left of the past; a mean
    over prompts, branches and queries, a sum over the query heads that share the head's keys. It is exact for each head
    by itself: neither leave-one-out nor additive.

    Attributes:
        importance: `output`: the squared distance between the outputs of attention with and without the others, through
            the output projection if the model tells it (`View.output_projection`); `mass`: the attention that the
            others receive.
        queries: evenly spaced queries of each segment that are looked at.
        recent: newest segments of a next-token model that are among the sources.
    """

    importance: Importance = "output"
    queries: int = 16
    recent: int = 8

    kind: ClassVar[str] = "subset_error"

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return [L, H, sets] of `error`."""
        sets = sum(2 ** len(sources) for sources in list_sources(spec, self.recent)[1:])
        return {"error": (spec.layers, spec.heads, sets)}

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Start the sums at zero."""
        super().prepare(spec, budget, artifact)
        self._sources = list_sources(spec, self.recent)

    def accumulate(self, view: View) -> None:
        """Add the error of the segment's queries."""
        if view.segment.index:
            self.add(view, self._look(view))

    def add(self, view: View, seen: "Seen") -> None:
        """Add what a layer shows after a segment that has sources."""
        masses = seen.log_masses.double().softmax(-1)
        if self.importance == "mass":
            errors = self.sum_rows(measure_lost_mass(masses))
        else:
            errors = self.sum_rows(measure_output_errors(masses, seen.outputs, seen.metric))
        start = sum(2 ** len(sources) for sources in self._sources[1 : view.segment.index])
        self.sums["error"][view.layer, :, start : start + errors.shape[-1]] += errors

    def sum_rows(self, errors: Tensor) -> Tensor:
        """Sum errors of rows, [rows, query heads per KV head, queries, n], over prompts: [H, n] on the CPU.

        It is a sum over the query heads too, and a mean over branches and queries.
        """
        of_rows = errors.mean(2).sum(1).unflatten(0, (-1, self.spec.heads))
        return (of_rows.sum(0) / self.spec.branches).cpu()

    def _look(self, view: View) -> "Seen":
        index, sources = view.segment.index, self._sources[view.segment.index]
        chosen = choose_window("uniform", view.segment, self.queries)
        parts = [[i for i in range(index) if i not in sources], *([i] for i in sources), [index]]
        slots = [self._find_slots(view, part) for part in parts]
        log_masses, outputs = attend_by_part(view.scores(chosen), view.cached_values(), slots)
        return Seen(sources, chosen, slots, log_masses, outputs, find_metric(view))

    def _find_slots(self, view: View, part: Sequence[int]) -> Slots:
        """Return the slots of neighbouring segments.

        The host knows them without asking the device, since a calibration keeps everything; but not where prompts are
        padded.
        """
        if not part:
            return slice(0, 0), None
        first, last = self.spec.segments[part[0]], self.spec.segments[part[-1]]
        if view.padding is None:
            return slice(first.start, last.end), None
        return slice(None), (view.segment_ids >= part[0]) & (view.segment_ids <= part[-1])


class Seen(NamedTuple):
    """Attention of a few queries to what is no source, to each source and to the current segment, each by itself.

    Attributes:
        sources: of the current segment, n of them.
        chosen: the queries, int64 [queries].
        slots: of each part, n + 2 of them.
        log_masses: float32 [rows, query heads per KV head, queries, n + 2], as `attend_by_part` returns them.
        outputs: float32 [rows, query heads per KV head, queries, n + 2, D].
        metric: W^T W of the output projections, float32 [rows, query heads per KV head, D, D]; None if the model does
            not tell them.
    """

    sources: tuple[int, ...]
    chosen: Tensor
    slots: Sequence[Slots]
    log_masses: Tensor
    outputs: Tensor
    metric: Tensor | None


def find_metric(view: View) -> Tensor | None:
    """Return W^T W of each query head's output projection, float32 [rows, query heads per KV head, D, D].

    None if the model does not tell it; distances are then those of attention's output itself.
    """
    weight = view.output_projection()
    if weight is None:
        return None
    return (weight.mT.float() @ weight.float()).repeat(view.sequences, 1, 1, 1)


def square_lengths(x: Tensor, metric: Tensor | None) -> Tensor:
    """Return squared lengths of vectors [rows, query heads or 1, n, D] under `find_metric`, [rows, query heads, n]."""
    return (x * (x if metric is None else x @ metric)).sum(-1)


def attend_by_part(scores: Tensor, values: Tensor, parts: Sequence[Slots]) -> tuple[Tensor, Tensor]:
    """Attend to each part of the past and the present by itself.

    Args:
        scores: float32 [rows, query heads per KV head, queries, slots].
        values: [rows, slots, D].
        parts: slots of each part.

    Returns:
        Log-sum-exp of the scores float32 [rows, query heads per KV head, queries, parts], -inf without a slot, and
        outputs float32 [rows, query heads per KV head, queries, parts, D], 0 without a slot.
    """
    log_masses, outputs = [], []
    for slots, exists in parts:
        inner = scores[..., slots]
        if exists is not None:
            inner = inner.masked_fill(~exists[:, None, None], -torch.inf)
        log_masses.append(inner.logsumexp(-1))
        outputs.append(softmax_seen(inner) @ values[:, None, slots].float())
    return torch.stack(log_masses, -1), torch.stack(outputs, -2)


def sum_subsets(values: Tensor) -> Tensor:
    """Sum the values of each set: [..., 2^n] of values [..., n]."""
    sums = torch.zeros_like(values[..., :1]) if values.shape[-1] else values.new_zeros(*values.shape[:-1], 1)
    for value in values.unbind(-1):
        sums = torch.cat((sums, sums + value[..., None]), -1)
    return sums


def measure_lost_mass(masses: Tensor) -> Tensor:
    """Return the attention that the past outside each set of the sources receives, [..., 2^n].

    Args:
        masses: attention that each part receives [..., n + 2]: what is no source, every source, the current segment.
    """
    return 1 - masses[..., -1:] - sum_subsets(masses[..., 1:-1])


def measure_output_errors(masses: Tensor, outputs: Tensor, metric: Tensor | None) -> Tensor:
    """Return how far attention's output lies from the full one, squared, for each set of sources left: [..., 2^n].

    Left with the set S, and the current segment c in any case, attention gives o_S. Then o_S - o is the sum over c and
    S of d_i = p_i (o_i - o), for a part of mass p_i and output o_i, divided by the mass of c and S. Its squared length
    comes from the Gram matrix of the d_i, which all sets share.

    Args:
        masses: attention that each part receives, float64 [..., n + 2]: what is no source, every source, the current
            segment.
        outputs: attention's output in each part by itself [..., n + 2, D].
        metric: W^T W of the output projections, [rows, query heads, D, D] where the first dimensions of `masses` are
            [rows, query heads, queries]; None for the distance between the outputs themselves.
    """
    whole = (masses[..., None] * outputs).sum(-2, keepdim=True)
    apart = (masses[..., None] * (outputs - whole))[..., 1:, :]
    gram = (apart if metric is None else apart @ metric[:, :, None].to(apart)) @ apart.mT
    squares, mass = gram[..., -1, -1:], masses[..., -1:]
    for source in range(gram.shape[-1] - 1):
        # Twice the products with the current segment and with those of each set of earlier ones, and its own.
        products = gram[..., source, -1:] + sum_subsets(gram[..., source, :source])
        squares = torch.cat((squares, squares + 2 * products + gram[..., source, source, None]), -1)
        mass = torch.cat((mass, mass + masses[..., source + 1, None]), -1)
    return (squares / mass.square()).clamp(min=0)
