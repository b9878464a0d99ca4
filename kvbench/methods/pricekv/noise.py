"""Error of attention's output if a past block is read in fewer bits, measured for every block and precision."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec
from kvbench.core.storage import Precision
from kvbench.methods.pricekv.errors import Seen, SubsetError, attend_by_part
from kvbench.methods.shared.capabilities import ReadsCodebooks
from kvbench.methods.shared.view import View

WHOLE = Precision(16)
"""The precision in which nothing is lost."""


@dataclass
class PrecisionError(ReadsCodebooks, SubsetError):
    """Calibrates, beside the error for each set of past blocks, what each precision of each block adds to it.

    The tensor `noise` is float64 [L, H, K - 1, F, K]: the squared error at consumer k, as `error` has it, if source i
    alone is read in precision f and all else as it was; 0 where i is not among the sources of k. Noises of different
    blocks have little to do with each other, so that their squares add up.

    Attributes:
        menu: precisions that a block may have.
    """

    menu: tuple[Precision, ...] = ()

    kind: ClassVar[str] = "precision_error"

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return [L, H, sets] of `error` and [L, H, K - 1, F, K] of `noise`."""
        count = len(spec.segments)
        noise = (spec.layers, spec.heads, count - 1, len(self.menu), count)
        return super().tensor_shapes(spec) | {"noise": noise}

    def add(self, view: View, seen: Seen) -> None:
        """Add the errors, and the noise of each precision."""
        super().add(view, seen)
        past = (view.cached_keys(), view.cached_values())
        queries, sums = view.queries(seen.chosen), self.sums["noise"][view.layer]
        ends = np.cumsum([self.spec.lengths[source] for source in seen.sources]).tolist()
        parts = [(slice(start, end), None) for start, end in pairwise([0, *ends])]
        for bits in {precision.bits for precision in self.menu}:
            read = self._read_sources(view, past, seen.sources, bits)
            for number, precision in enumerate(self.menu):
                if precision.bits == bits and precision != WHOLE:
                    keys, values = (share(x) if precision.shared else x for x in read)
                    scores = queries @ keys[:, None].mT.float()
                    noise = self.sum_rows(measure_noise(seen, *attend_by_part(scores, values, parts)))
                    sums[:, list(seen.sources), number, view.segment.index] += noise

    def _read_sources(
        self, view: View, past: tuple[Tensor, Tensor], sources: Sequence[int], bits: int
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of the sources, one behind the other, as they are read from so many bits."""
        found = []
        for source in sources:
            segment = self.spec.segments[source]
            keys, values = (x[:, segment.start : segment.end] for x in past)
            found.append(view.read_back(keys, values, segment, bits))
        keys, values = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        return keys, values


def share(rows: Tensor) -> Tensor:
    """Give the unconditional sequences, the second half of the rows, what their conditional twins have."""
    return rows[: len(rows) // 2].repeat(2, *[1] * (rows.dim() - 1))


def measure_noise(seen: Seen, log_masses: Tensor, outputs: Tensor) -> Tensor:
    """Return how far attention's output moves, squared, if one source is read otherwise: [..., n].

    With masses p_i and outputs o_i of the parts, o = sum p_i o_i. Source i with mass p and output r in their place
    gives (o - p_i o_i + p r) / (1 - p_i + p), which lies (p (r - o) - p_i (o_i - o)) / (1 - p_i + p) from o.

    Args:
        seen: attention as it was.
        log_masses: of each source read otherwise, float32 [..., n].
        outputs: of each source read otherwise, float32 [..., n, D].
    """
    total = seen.log_masses.double().logsumexp(-1, keepdim=True)
    masses = (seen.log_masses - total).exp()
    whole = (masses[..., None] * seen.outputs).sum(-2, keepdim=True)
    before, after = masses[..., 1:-1, None], (log_masses - total).exp()[..., None]
    moved = after * (outputs - whole) - before * (seen.outputs[..., 1:-1, :] - whole)
    moved = moved / (1 - before + after)
    turned = moved if seen.metric is None else moved @ seen.metric[:, :, None].to(moved)
    return (turned * moved).sum(-1)


def list_precisions(menu: Sequence[int], *, shared: bool) -> tuple[Precision, ...]:
    """Return the precisions of a menu, the largest first.

    Args:
        menu: bits of a number.
        shared: unconditional sequences may read what their conditional twins store.
    """
    precisions = [Precision(bits, twins) for bits in menu for twins in (False, True)[: 1 + shared]]
    return tuple(sorted(precisions, key=lambda precision: (-count_bits(precision, 2), precision.shared)))


def count_bits(precision: Precision, branches: int) -> int:
    """Return the bits that a number takes in all branches of a prompt together."""
    return precision.bits * (1 if precision.shared else branches)
