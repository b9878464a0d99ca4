"""What attention's output would miss without some of its past: measured for every set of past blocks at once.

A set of blocks is a number whose bit i stands for block i. Sets of the blocks before block k are numbers below 2^k.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec
from kvbench.methods.base import Artifact, Observer, View
from kvbench.methods.pricekv.blocks import group_segments
from kvbench.methods.select import choose_window

Importance = Literal["output", "mass"]


@dataclass
class SubsetError(Observer):
    """Calibrates the error of each head's attention for each set of past blocks that it could be left with.

    The tensor `error` is float64 [L, H, 2^K - 2] for K blocks: entry 2^k - 2 + S is the error of the queries of block k
    when of the blocks before it only those of set S are left; a mean over prompts, branches and queries, a sum over the
    query heads that share the head's keys. It is exact for each head by itself: neither leave-one-out nor additive.

    Attributes:
        importance: `output`: the squared distance between the outputs of attention with and without the others, through
            the output projection if the model tells it (`View.output_projection`); `mass`: the attention that the
            others receive.
        queries: evenly spaced queries of each segment that are looked at.
        blocks: most blocks that a sequence is divided into (`blocks.group_segments`).
    """

    importance: Importance = "output"
    queries: int = 16
    blocks: int = 13

    kind: ClassVar[str] = "subset_error"
    tensor: ClassVar[str] = "error"

    def tensor_shape(self, spec: ModelSpec) -> tuple[int, ...]:
        """Return [L, H, 2^K - 2]."""
        return (spec.layers, spec.heads, 2 ** len(group_segments(spec, self.blocks).lengths) - 2)

    def prepare(self, spec: ModelSpec, budget: Budget, artifact: Artifact | None = None) -> None:
        """Start the sums at zero."""
        super().prepare(spec, budget, artifact)
        self._blocks = group_segments(spec, self.blocks)

    def watch(self, view: View) -> None:
        """Add the error of the segment's queries."""
        current = self._blocks.of_segment[view.at.index]
        if current == 0:
            return
        chosen = choose_window("uniform", view.at, self.queries)
        log_masses, outputs = self._attend_by_block(view, chosen, current + 1)
        masses = log_masses.double().softmax(-1)
        if self.importance == "mass":
            errors = measure_lost_mass(masses)
        else:
            weight = view.output_projection()
            metric = (
                None
                if weight is None
                else (weight.mT.float() @ weight.float()).repeat(view.sequences, 1, 1, 1)
            )
            errors = measure_output_errors(masses, outputs, metric)
        errors = errors.mean(2).sum(1).unflatten(0, (-1, self.spec.heads)).sum(0) / self.spec.branches
        share = view.at.length / self._blocks.lengths[current]
        sets = slice(2**current - 2, 2 ** (current + 1) - 2)
        self.sums[view.layer, :, sets] += share * errors.cpu()

    def _attend_by_block(self, view: View, chosen: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Attend to each block by itself.

        Returns:
            Log-sum-exp of the scores float32 [rows, query heads per KV head, queries, blocks], -inf without a slot, and
            outputs float32 [rows, query heads per KV head, queries, blocks, D], 0 without a slot.
        """
        scores, values = view.scores(chosen), view.cached_values()
        of_segment = torch.tensor(self._blocks.of_segment).to(view.segment.device)
        block = of_segment[view.segment.clamp(min=0)].masked_fill(view.segment < 0, -1)
        log_masses, outputs = [], []
        for source in range(blocks):
            slots = (block == source).any(0).nonzero().flatten()
            outside = (block[:, slots] != source)[:, None, None]
            inner = scores[..., slots].masked_fill(outside, -torch.inf)
            log_masses.append(inner.logsumexp(-1))
            weights = inner.softmax(-1).nan_to_num(0)
            outputs.append(weights @ values[:, None, slots].float())
        return torch.stack(log_masses, -1), torch.stack(outputs, -2)


def sum_subsets(values: Tensor) -> Tensor:
    """Sum the values of each set: [..., 2^n] of values [..., n]."""
    sums = torch.zeros_like(values[..., :1]) if values.shape[-1] else values.new_zeros(*values.shape[:-1], 1)
    for value in values.unbind(-1):
        sums = torch.cat((sums, sums + value[..., None]), -1)
    return sums


def measure_lost_mass(masses: Tensor) -> Tensor:
    """Return the attention that the past blocks outside each set receive, [..., 2^k].

    Args:
        masses: attention that each block receives [..., k + 1], the current block last.
    """
    past = masses[..., :-1]
    return past.sum(-1, keepdim=True) - sum_subsets(past)


def measure_output_errors(masses: Tensor, outputs: Tensor, metric: Tensor | None) -> Tensor:
    """Return how far attention's output lies from the full one, squared, for each set of past blocks left: [..., 2^k].

    Left with the set S, and the current block c in any case, attention gives o_S. Then o_S - o is the sum over c and S
    of d_i = p_i (o_i - o), for a block of mass p_i and output o_i, divided by the mass of c and S. Its squared length
    comes from the Gram matrix of the d_i, which all sets share. The full set has 0.

    Args:
        masses: attention that each block receives, float64 [..., k + 1], the current block last.
        outputs: attention's output in each block by itself [..., k + 1, D].
        metric: W^T W of the output projections, [rows, query heads, D, D] where the first dimensions of `masses` are
            [rows, query heads, queries]; None for the distance between the outputs themselves.
    """
    whole = (masses[..., None] * outputs).sum(-2, keepdim=True)
    apart = masses[..., None] * (outputs - whole)
    gram = (apart if metric is None else apart @ metric[:, :, None].to(apart)) @ apart.mT
    squares, mass = gram[..., -1, -1:], masses[..., -1:]
    for block in range(masses.shape[-1] - 1):
        # Twice the products with the current block and with those of each set of earlier ones, and its own.
        products = gram[..., block, -1:] + sum_subsets(gram[..., block, :block])
        squares = torch.cat((squares, squares + 2 * products + gram[..., block, block, None]), -1)
        mass = torch.cat((mass, mass + masses[..., block, None]), -1)
    errors = (squares / mass.square()).clamp(min=0)
    errors[..., -1] = 0
    return errors
