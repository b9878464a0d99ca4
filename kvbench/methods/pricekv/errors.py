"""Error of attention's output for every subset of the past segments, and its calibration."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec
from kvbench.methods.pricekv.problem import list_sources
from kvbench.methods.shared.calibration import Observer
from kvbench.methods.shared.select import choose_window, softmax_seen
from kvbench.methods.shared.utility import find_metric
from kvbench.methods.shared.view import View

Importance = Literal["output", "mass"]
Slots = tuple[slice, Tensor | None]
"""A slice of slots and the mask of its valid slots, bool [rows, slots]; None if all are valid."""


@dataclass
class SubsetError(Observer):
    """Calibration of each head's attention error for every subset of past blocks that it may store.

    The tensor `error` is float64 [L, H, sets]: for each segment except the first, in order, the error of its queries
    for every set of its sources (`problem.list_sources`) if the head stores no other past. It is a mean over prompts,
    branches and queries, and a sum over the query heads of a KV head. It is exact for a head on its own: neither
    leave-one-out nor additive.

    Attributes:
        importance: `output`: squared distance of attention's output from the full output, through the output projection
            if the model exposes it (`View.output_projection`); `mass`: attention that missing blocks receive.
        queries: number of evenly spaced queries of each segment.
        recent: number of newest segments among the sources of a next-token model.
    """

    importance: Importance = "output"
    queries: int = 16
    recent: int = 8

    kind: ClassVar[str] = "subset_error"

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shape [L, H, sets] of `error`."""
        sets = sum(2 ** len(sources) for sources in list_sources(spec, self.recent)[1:])
        return {"error": (spec.layers, spec.heads, sets)}

    def prepare(self, spec: ModelSpec) -> None:
        """Set the sums to zero."""
        super().prepare(spec)
        self._sources = list_sources(spec, self.recent)

    def accumulate(self, view: View) -> None:
        """Add the error that each set of sources causes the segment's queries."""
        if view.segment.index:
            self.add(view, self._attend(view))

    def add(self, view: View, attention: "PartialAttention") -> None:
        """Add the errors of a layer after a segment that has sources."""
        masses = attention.log_masses.double().softmax(-1)
        if self.importance == "mass":
            errors = self.sum_rows(1 - masses[..., -1:] - sum_subsets(masses[..., 1:-1]))
        else:
            errors = self.sum_rows(measure_output_errors(masses, attention.outputs, attention.metric))
        start = sum(2 ** len(sources) for sources in self._sources[1 : view.segment.index])
        self.sums["error"][view.layer, :, start : start + errors.shape[-1]] += errors

    def sum_rows(self, errors: Tensor) -> Tensor:
        """Sum errors [rows, query heads per KV head, queries, n] over prompts and query heads: [H, n] on the CPU.

        The sum is averaged over branches and queries.
        """
        of_rows = errors.mean(2).sum(1).unflatten(0, (-1, self.spec.heads))
        return (of_rows.sum(0) / self.spec.branches).cpu()

    def _attend(self, view: View) -> "PartialAttention":
        index, sources = view.segment.index, self._sources[view.segment.index]
        queries = choose_window("uniform", view.segment, self.queries)
        parts = [[i for i in range(index) if i not in sources], *([i] for i in sources), [index]]
        slots = [self._find_slots(view, segments) for segments in parts]
        log_masses, outputs = attend_by_part(view.scores(queries), view.cached_values(), slots)
        return PartialAttention(sources, queries, log_masses, outputs, find_metric(view))

    def _find_slots(self, view: View, segments: Sequence[int]) -> Slots:
        """Return the slots of consecutive segments.

        A calibration keeps everything, so without padding the slots are known without reading from the device.
        """
        if not segments:
            return slice(0, 0), None
        first, last = self.spec.segments[segments[0]], self.spec.segments[segments[-1]]
        if view.padding is None:
            return slice(first.start, last.end), None
        return slice(None), (view.segment_ids >= segments[0]) & (view.segment_ids <= segments[-1])


class PartialAttention(NamedTuple):
    """Attention of a few queries to each part alone: past segments that are not sources, n sources, current segment.

    Attributes:
        sources: sources of the current segment.
        queries: indices of the queries, int64 [queries].
        log_masses: float32 [rows, query heads per KV head, queries, n + 2] from `attend_by_part`.
        outputs: float32 [rows, query heads per KV head, queries, n + 2, D].
        metric: see `find_metric`.
    """

    sources: tuple[int, ...]
    queries: Tensor
    log_masses: Tensor
    outputs: Tensor
    metric: Tensor | None


def attend_by_part(scores: Tensor, values: Tensor, parts: Sequence[Slots]) -> tuple[Tensor, Tensor]:
    """Attend to each part of the past, and to the current segment, alone.

    Scores are float32 [rows, query heads per KV head, queries, slots], values [rows, slots, D]. Returns the log-sum-exp
    of the scores, float32 [rows, query heads per KV head, queries, parts], -inf without a slot, and outputs, float32
    [rows, query heads per KV head, queries, parts, D], 0 without a slot.
    """
    log_masses, outputs = [], []
    for slots, valid in parts:
        of_part = scores[..., slots]
        if valid is not None:
            of_part = of_part.masked_fill(~valid[:, None, None], -torch.inf)
        log_masses.append(of_part.logsumexp(-1))
        outputs.append(softmax_seen(of_part) @ values[:, None, slots].float())
    return torch.stack(log_masses, -1), torch.stack(outputs, -2)


def sum_subsets(values: Tensor) -> Tensor:
    """Sum the values of each set: [..., 2^n] from values [..., n]."""
    sums = torch.zeros_like(values[..., :1]) if values.shape[-1] else values.new_zeros(*values.shape[:-1], 1)
    for value in values.unbind(-1):
        sums = torch.cat((sums, sums + value[..., None]), -1)
    return sums


def measure_output_errors(masses: Tensor, outputs: Tensor, metric: Tensor | None) -> Tensor:
    """Return the squared distance of attention's output from the full output for each set of sources: [..., 2^n].

    With the set S and the current segment c, attention gives o_S. Then o_S - o is the sum over c and S of d_i = p_i
    (o_i - o), for a part of mass p_i and output o_i, divided by the mass of c and S. Its squared length follows from
    the Gram matrix of the d_i, which all sets share. Masses are float64 [..., n + 2], outputs [..., n + 2, D], in the
    order of `PartialAttention`; `metric` (`find_metric`) is [rows, query heads, D, D] if the first dimensions of masses
    are [rows, query heads, queries].
    """
    full = (masses[..., None] * outputs).sum(-2, keepdim=True)
    differences = (masses[..., None] * (outputs - full))[..., 1:, :]
    projected = differences if metric is None else differences @ metric[:, :, None].to(differences)
    gram = projected @ differences.mT
    squares, mass = gram[..., -1, -1:], masses[..., -1:]
    for source in range(gram.shape[-1] - 1):
        # Adding a source adds its square and twice its products with the current segment and the sources of the set.
        products = gram[..., source, -1:] + sum_subsets(gram[..., source, :source])
        squares = torch.cat((squares, squares + 2 * products + gram[..., source, source, None]), -1)
        mass = torch.cat((mass, mass + masses[..., source + 1, None]), -1)
    return (squares / mass.square()).clamp(min=0)
