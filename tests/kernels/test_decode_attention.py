"""One new token over rows of unequal length, on a GPU or interpreted, against double precision row by row."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.kernels.decode_attention import decode_attention, prepare_rows
from kvbench.kernels.layout import Past, arrange_rows
from tests.support.reference_attention import attention, rounding
from tests.support.triton_device import DEVICE, needs_loops

pytest.importorskip("triton")

from kvbench.kernels.triton.decode_attention import decode_attention_triton

# Interpreted, bfloat16 can be stored, but neither multiplied nor rounded to.
DTYPES = (torch.float32, torch.float16, *((torch.bfloat16,) if DEVICE == "cuda" else ()))
ROOM = 5


class Case(NamedTuple):
    """Storage of ragged rows with free slots behind them, random numbers in every slot, and one new token."""

    q: Tensor
    k: Tensor
    v: Tensor
    stored: Past


def make(
    batch: int,
    held: list[int],
    queries: int,
    channels: int,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    seed: int = 0,
) -> Case:
    """Queries lie as a model leaves them, keys and values as parts of one product [batch, 2, rows, D]."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        numbers = torch.randn(*shape, generator=generator)
        return (numbers.bfloat16() if stored == torch.bfloat16 else numbers).to(dtype).to(DEVICE)

    rows, slots = len(held), torch.arange(max(held), device=DEVICE)
    counts = torch.tensor(held, device=DEVICE)[:, None]
    layout = arrange_rows(torch.where(slots < counts, slots, -1), held, ROOM)
    k, v = normal(batch, 2, rows, channels).unsqueeze(3).unbind(1)
    q = normal(batch, 1, rows, queries, channels)[:, 0]
    keys, values = (normal(batch, layout.capacity, channels).to(stored or dtype) for _ in range(2))
    return Case(q, k, v, Past(keys, values, layout))


@needs_loops
@given(
    batch=st.integers(1, 2),
    held=st.lists(st.sampled_from((0, 1, 28, 31, 32, 60, 63, 64, 65, 130)), min_size=1, max_size=3),
    queries=st.sampled_from((1, 2, 3, 4, 8)),
    channels=st.sampled_from((24, 32, 64, 80, 128)),
    dtype=st.sampled_from(DTYPES),
    stored=st.sampled_from((None, torch.float32, torch.float16, torch.bfloat16)),
    filled=st.integers(0, ROOM - 1),
    share=st.sampled_from((None, 1, 2, 3, 8)),
    scale=st.sampled_from((1.0, 0.2)),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=25, deadline=None)
def test_a_token_attends_to_its_row_and_joins_it(
    batch: int,
    held: list[int],
    queries: int,
    channels: int,
    dtype: torch.dtype,
    stored: torch.dtype | None,
    filled: int,
    share: int | None,
    scale: float,
    seed: int,
) -> None:
    case = make(batch, held, queries, channels, dtype, stored, seed)
    keys, values = case.stored.keys.clone(), case.stored.values.clone()
    came = torch.tensor([filled], device=DEVICE)
    out = decode_attention_triton(*case, came, scale, share=share)
    assert (out.shape, out.dtype, out.is_contiguous()) == (case.q.shape, dtype, True)
    for row, (start, length) in enumerate(zip(case.stored.layout.offsets.tolist(), held, strict=True)):
        end = start + length + filled
        keys[:, end], values[:, end] = case.k[:, row, 0].to(keys.dtype), case.v[:, row, 0].to(values.dtype)
        past, present = ([x[:, at].to(dtype) for x in (keys, values)] for at in (slice(start, end), [end]))
        expected, _ = attention(case.q[:, row], past, present, scale, causal=False)
        bound, _ = rounding(case.q[:, row], past, present, scale)
        excess = (out[:, row].double() - expected).abs() / bound
        assert excess.max() <= 1, excess.max()
    assert torch.equal(case.stored.keys, keys)  # the token's slots, and no other
    assert torch.equal(case.stored.values, values)


@needs_loops
@given(
    held=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    batch=st.integers(1, 2),
    queries=st.sampled_from((1, 4)),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=10, deadline=None)
def test_steps_of_a_segment_are_those_of_the_other_arrangements(
    held: list[int], batch: int, queries: int, seed: int
) -> None:
    case, filled = make(batch, held, queries, 16, seed=seed), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    kernel = prepare_rows(
        Past(case.stored.keys.clone(), case.stored.values.clone(), case.stored.layout), "kernel", filled
    )
    other = prepare_rows(case.stored, "grouped")
    for came in range(ROOM):
        token = make(batch, held, queries, 16, seed=seed + 1 + came)[:3]
        found, expected = (decode_attention(*token, rows, came, 0.3) for rows in (kernel, other))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        filled += 1
    assert torch.equal(kernel.past.keys, case.stored.keys)
    assert torch.equal(kernel.past.values, case.stored.values)


@needs_loops
@pytest.mark.parametrize("share", [1, 3])
def test_large_scores_do_not_overflow(share: int) -> None:
    case = make(1, [70, 0], 4, 16)
    case = case._replace(
        q=case.q * 30, k=case.k * 30, stored=case.stored._replace(keys=case.stored.keys * 30)
    )
    assert torch.isfinite(
        decode_attention_triton(*case, torch.tensor([0], device=DEVICE), 1.0, share=share)
    ).all()
