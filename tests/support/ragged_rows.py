"""Random rows of unequal length, as kernels are given them."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.support.reference_attention import Pair, attention, received, scores
from kvbench.kernels.compact import source_table
from kvbench.kernels.layout import Layout, Past, empty_layout, list_positions
from tests.support.triton_device import DEVICE

# Interpreted, bfloat16 can be stored but neither multiplied nor rounded to.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


class Case(NamedTuple):
    """Queries, keys and values [sequences, heads, ...] and what was cached before, flat."""

    q: Tensor
    k: Tensor
    v: Tensor
    stored: Past

    @property
    def layout(self) -> Layout:
        return self.stored.layout

    @property
    def past(self) -> list[tuple[Tensor, Tensor]]:
        """Cached keys and values of each row, [batch, length, D]."""
        spans = [
            (o, o + n)
            for o, n in zip(self.layout.offsets.tolist(), self.layout.lengths.tolist(), strict=True)
        ]
        return [(self.stored.keys[:, start:stop], self.stored.values[:, start:stop]) for start, stop in spans]

    @property
    def folded(self) -> "Case":
        """The same with queries, keys and values by rows, [batch, rows, ...]."""
        shape = (len(self.stored.keys), len(self.layout.counts))
        q, k, v = (x.reshape(*shape, *x.shape[2:]) for x in (self.q, self.k, self.v))
        return self._replace(q=q, k=k, v=v)


def make(
    batch: int,
    held: list[int],
    folds: int,
    tokens: int,
    channels: int,
    *,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    strided: bool = True,
    apart: bool = False,
    free_slots: int = 0,
    seed: int = 0,
    device: str = DEVICE,
) -> Case:
    """Queries, keys and values as views of one product [batch, tokens, 3, rows, D] if strided, else contiguous.

    Sequences share a layout of rows that hold `held` slots, or each has rows of its own if `apart`. Free slots behind
    rows have random numbers, too.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    heads = len(held)
    q, k, v = (x.transpose(1, 2) for x in normal(batch, tokens, 3, heads, channels).unbind(2))
    if folds > 1:
        q = normal(batch, heads, folds * tokens, channels)
    if not strided:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    lengths = [length + 3 * number for number in range(batch) for length in held] if apart else held
    keep = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    empty = empty_layout(len(lengths), device)
    positions = list_positions(empty, 0, max(lengths))
    layout, _ = source_table(empty, keep.to(device), positions, max(lengths), free_slots)
    shape = (1 if apart else batch, layout.capacity, channels)
    keys, values = (normal(*shape).to(stored or dtype) for _ in range(2))
    return Case(q, k, v, Past(keys, values, layout))


def check(found: tuple[Tensor, Tensor | None], case: Case, scale: float, causal: bool = False) -> None:
    """Assert that each row attends to its past and to the tokens of the present that there are."""
    assert (found[0].shape, found[0].dtype) == (case.q.shape, case.q.dtype)
    assert found[1] is None or found[1].dtype == torch.float32
    case = case.folded
    out, lse = found[0].reshape(case.q.shape), found[1]
    lse = None if lse is None else lse.reshape(case.q.shape[:3])
    for row, (keys, values) in enumerate(case.past):
        past, present = (keys.to(out.dtype), values.to(out.dtype)), (case.k[:, row], case.v[:, row])
        if keys.shape[1] + case.k.shape[2]:
            of_row = out[:, row], None if lse is None else lse[:, row]
            agrees(of_row, case.q[:, row], past, present, scale, causal)
        else:
            assert not out[:, row].any()
            assert lse is None or (lse[:, row] == -torch.inf).all()


def check_mass(mass: Tensor, case: Case, scale: float, power: int, causal: bool) -> None:
    """Assert that each slot has the mean of its probability's power, and zero stands beyond a row's end."""
    longest, tokens, case = case.layout.longest, case.k.shape[2], case.folded
    assert (mass.shape, mass.dtype) == ((*case.q.shape[:2], longest + tokens), torch.float32)
    for row, (keys, _) in enumerate(case.past):
        expected = received(case.q[:, row], keys, case.k[:, row], scale, power, causal)
        length = keys.shape[1]
        shown = torch.cat((mass[:, row, :length], mass[:, row, longest:]), 1)
        torch.testing.assert_close(shown.double(), expected, atol=1e-6, rtol=1e-4)
        assert not mass[:, row, length:longest].any()


LENGTHS = st.sampled_from((0, 1, 15, 31, 32, 33, 63, 64, 65, 96, 130))
CASES = {
    "batch": st.integers(1, 2),
    "held": st.lists(LENGTHS, min_size=1, max_size=3),
    "folds": st.integers(1, 3),
    "tokens": st.sampled_from((1, 2, 7, 16, 31, 32, 33, 64, 70)),
    "channels": st.sampled_from((16, 24, 32, 64, 80)),
    "dtype": st.sampled_from(sorted({torch.float32, torch.float16, HALF}, key=str)),
    "strided": st.booleans(),
    "apart": st.booleans(),
    "seed": st.integers(0, 10**6),
}


def agrees(
    found: tuple[Tensor, Tensor | None], q: Tensor, past: Pair, present: Pair, scale: float, causal: bool
) -> None:
    """Assert that an output, and a log-sum-exp if there is one, equal `attention`, up to `rounding`."""
    for part, expected, bound in zip(
        found, attention(q, past, present, scale, causal), rounding(q, past, present, scale), strict=True
    ):
        if part is not None:
            excess = (part.double() - expected).abs() / bound
            assert excess.max() <= 1, excess.max()


def rounding(q: Tensor, past: Pair, present: Pair, scale: float) -> tuple[Tensor, Tensor]:
    """Return error bounds of float32 arithmetic, for the output [batch, queries, 1] and log-sum-exp [batch, queries].

    The error of a logit grows with the size of its products; it scales the probability, and so the values.
    Probabilities are rounded to q's dtype before the product with the values, and the output is rounded again.
    A log-sum-exp is rounded in both bases and at every step in between.
    """
    logit = scores(q.abs(), past[0].abs(), present[0].abs(), abs(scale)).amax(-1)
    logit = torch.finfo(torch.float32).eps * (1 + logit)
    largest = torch.cat((past[1], present[1]), 1).double().abs().amax((1, 2))[:, None]
    return ((logit + torch.finfo(q.dtype).eps) * largest)[..., None], 4 * logit
