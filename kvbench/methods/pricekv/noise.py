"""Error of attention's output if a past block is stored in fewer bits, and its calibration."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec
from kvbench.methods.pricekv.errors import PartialAttention, SubsetError, attend_by_part
from kvbench.methods.shared.precision import Precision
from kvbench.methods.shared.uses import Uses
from kvbench.methods.shared.view import View

LOSSLESS = Precision(16)


@dataclass
class PrecisionError(SubsetError):
    """Calibration of the error for each set of past blocks, and of the error that each precision of a block adds.

    The tensor `noise` is float64 [L, H, K - 1, F, K]: the squared error at target k if source i alone is stored in
    precision f; 0 if i is not a source of k. Noises of different blocks are nearly uncorrelated, so their squares add
    up.

    Attributes:
        menu: precisions that a block may have.
    """

    menu: tuple[Precision, ...] = ()

    kind: ClassVar[str] = "precision_error"

    @property
    def uses(self) -> Uses:
        """Static codebooks, through which keys and values are read."""
        return Uses(codebooks=True)

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `error`, [L, H, sets], and `noise`, [L, H, K - 1, F, K]."""
        count = len(spec.segments)
        noise = (spec.layers, spec.heads, count - 1, len(self.menu), count)
        return super().tensor_shapes(spec) | {"noise": noise}

    def add(self, view: View, attention: PartialAttention) -> None:
        """Add the errors, and the noise of each precision."""
        super().add(view, attention)
        sources, sums = attention.sources, self.sums["noise"][view.layer]
        queries, past = view.queries(attention.queries), (view.cached_keys(), view.cached_values())
        ends = np.cumsum([self.spec.lengths[source] for source in sources]).tolist()
        parts = [(slice(start, end), None) for start, end in pairwise([0, *ends])]
        for bits in {precision.bits for precision in self.menu}:
            plain = self._decode_sources(view, past, sources, bits)
            for index, precision in enumerate(self.menu):
                if precision.bits == bits and precision != LOSSLESS:
                    keys, values = map(share, plain) if precision.shared else plain
                    scores = queries @ keys[:, None].mT.float()
                    noise = self.sum_rows(measure_noise(attention, *attend_by_part(scores, values, parts)))
                    sums[:, list(sources), index, view.segment.index] += noise

    def _decode_sources(
        self, view: View, past: tuple[Tensor, Tensor], sources: Sequence[int], bits: int
    ) -> tuple[Tensor, Tensor]:
        """Return the decoded keys and values of the sources, concatenated, [rows, tokens, D]."""
        decoded = []
        for source in sources:
            segment = self.spec.segments[source]
            keys, values = (x[:, segment.start : segment.end] for x in past)
            decoded.append(view.read_back(keys, values, segment, bits))
        keys, values = (torch.cat(parts, 1) for parts in zip(*decoded, strict=True))
        return keys, values


def share(rows: Tensor) -> Tensor:
    """Give the unconditional sequences, the second half of the rows, the contents of the conditional sequences."""
    return rows[: len(rows) // 2].repeat(2, *[1] * (rows.dim() - 1))


def measure_noise(attention: PartialAttention, log_masses: Tensor, outputs: Tensor) -> Tensor:
    """Return the squared change of attention's output if one source is decoded from fewer bits: [..., n].

    With masses p_i and outputs o_i of the parts, o = sum p_i o_i. If source i has mass p and output r instead, the
    output is (o - p_i o_i + p r) / (1 - p_i + p), and its change is (p (r - o) - p_i (o_i - o)) / (1 - p_i + p).
    `log_masses` [..., n] and `outputs` [..., n, D] of the decoded sources are float32.
    """
    total = attention.log_masses.double().logsumexp(-1, keepdim=True)
    masses = (attention.log_masses - total).exp()
    full = (masses[..., None] * attention.outputs).sum(-2, keepdim=True)
    before, after = masses[..., 1:-1, None], (log_masses - total).exp()[..., None]
    change = after * (outputs - full) - before * (attention.outputs[..., 1:-1, :] - full)
    change = change / (1 - before + after)
    projected = change if attention.metric is None else change @ attention.metric[:, :, None].to(change)
    return (projected * change).sum(-1)


def list_precisions(menu: Sequence[int], *, shared: bool) -> tuple[Precision, ...]:
    """Return the precisions of a menu of bits, largest first; `shared` adds each stored once for both branches."""
    precisions = [Precision(bits, is_shared) for bits in menu for is_shared in (False, True)[: 1 + shared]]
    return tuple(sorted(precisions, key=lambda precision: (-count_bits(precision, 2), precision.shared)))


def count_bits(precision: Precision, branches: int) -> int:
    """Return the bits per value, summed over all branches of a prompt."""
    return precision.bits * (1 if precision.shared else branches)
