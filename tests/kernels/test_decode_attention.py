"""New tokens over rows of unequal length, by a kernel and as arranged for torch, against double precision by rows."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.support.reference_attention import attention, rounding
from kvbench.kernels import decode_attention as module
from kvbench.kernels.decode_attention import Arrangement, decode_attention, decode_token, prepare_rows
from kvbench.kernels.layout import Past, arrange_rows, place_rows
from tests.support.ragged_rows import Case
from tests.support.triton_device import DEVICE, needs_loops, on_device, sharing

# Interpreted, bfloat16 can be stored, but neither multiplied nor rounded to.
DTYPES = (torch.float32, torch.float16, *((torch.bfloat16,) if DEVICE == "cuda" else ()))
ROOM = 6


def make(
    batch: int, held: list[int], queries: int, channels: int, dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None, seed: int = 0, tokens: int = 1, device: str = DEVICE,
) -> Case:  # fmt: skip
    """Queries in a model's memory order, keys and values as parts of one product [batch, tokens, 2, rows, D].

    Rows have free slots behind them, and every slot random numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        numbers = torch.randn(*shape, generator=generator)
        return (numbers.bfloat16() if stored == torch.bfloat16 else numbers).to(dtype).to(device)

    rows, slots = len(held), torch.arange(max(held), device=device)
    counts = torch.tensor(held, device=device)[:, None]
    layout = arrange_rows(torch.where(slots < counts, slots, -1), held, ROOM)
    k, v = normal(batch, tokens, 2, rows, channels).transpose(1, 3).unbind(2)
    q = normal(batch, 1, rows, queries * tokens, channels)[:, 0]
    keys, values = (normal(batch, layout.capacity, channels).to(stored or dtype) for _ in range(2))
    return Case(q, k, v, Past(keys, values, layout))


@given(
    held=st.lists(st.integers(0, 9), min_size=1, max_size=7),
    steps=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    batch=st.integers(1, 2),
    queries=st.integers(1, 2),
    arrangement=st.sampled_from((None, "together", "grouped", "padded")),
    stored=st.sampled_from((None, torch.bfloat16)),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_arranged_rows_attend_to_their_own_tokens(
    held: list[int], steps: list[int], batch: int, queries: int, arrangement: Arrangement | None,
    stored: torch.dtype | None, seed: int,
) -> None:  # fmt: skip
    _, _, _, storage = make(batch, held, 1, 8, stored=stored, seed=seed, device="cpu")
    spans = [slice(start, start + n) for start, n in zip(storage.layout.offsets.tolist(), held, strict=True)]
    past = [[x[:, span].float() for x in storage[:2]] for span in spans]
    with pytest.MonkeyPatch.context() as patch:
        if arrangement is not None:
            patch.setattr(module, "_choose", lambda *_: arrangement)
        opened, filled = prepare_rows(storage), 0
    for step, end in zip(steps, accumulate(steps), strict=True):
        if end > ROOM:
            break
        q, k, v, _ = make(batch, held, queries, 8, stored=stored, seed=seed + end, tokens=step, device="cpu")
        found = decode_attention(q, k, v, opened, filled, 0.4)
        filled = end
        for row in range(len(held)):
            present = [x[:, row] for x in (k, v)]
            expected, _ = attention(q[:, row], past[row], present, 0.4, causal=True)
            torch.testing.assert_close(found[:, row].double(), expected, atol=2e-5, rtol=1e-4)
            past[row] = [torch.cat(pair, 1) for pair in zip(past[row], present, strict=True)]


@pytest.mark.slow
@needs_loops
@given(
    batch=st.integers(1, 2),
    held=st.lists(st.sampled_from((0, 1, 28, 31, 32, 60, 63, 64, 65, 130)), min_size=1, max_size=3),
    queries=st.sampled_from((1, 2, 3, 4, 8)),
    channels=st.sampled_from((24, 32, 64, 80, 100, 128)),
    dtype=st.sampled_from(DTYPES),
    stored=st.sampled_from((None, torch.float32, torch.float16, torch.bfloat16)),
    filled=st.integers(0, ROOM - 1),
    share=st.sampled_from((None, 1, 2, 3, 8)),
    scale=st.sampled_from((1.0, 0.2)),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=25, deadline=None)
def test_a_token_attends_to_its_row_and_joins_it(
    held: list[int], dtype: torch.dtype, filled: int, share: int | None, scale: float, **given: object
) -> None:
    check_token(make(held=held, dtype=dtype, **given), filled, share, scale)


def check_token(case: Case, filled: int, share: int | None, scale: float) -> None:
    """Assert that a step's token, after `filled` others, attends to its row and itself, and is stored behind them."""
    layout, dtype = case.stored.layout, case.q.dtype
    keys, values = case.stored.keys.clone(), case.stored.values.clone()
    came = torch.tensor([filled], device=DEVICE)
    with sharing(share), on_device():
        out = decode_token(*case[:3], place_rows(case.stored, came), scale)
    assert (out.shape, out.dtype, out.is_contiguous()) == (case.q.shape, dtype, True)
    for row, (start, length) in enumerate(zip(layout.offsets.tolist(), layout.counts, strict=True)):
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
@pytest.mark.parametrize("share", [1, 3])
def test_large_scores_do_not_overflow(share: int) -> None:
    q, k, v, (keys, values, layout, _) = make(1, [70, 0], 4, 16)
    rows = place_rows(Past(keys * 30, values, layout), torch.tensor([0], device=DEVICE))
    with sharing(share), on_device():
        assert torch.isfinite(decode_token(q * 30, k * 30, v, rows, 1.0)).all()
