"""New tokens over rows of unequal length, by a kernel and as arranged for torch, against double precision by rows."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.support.reference_attention import attention
from kvbench.kernels import decode_attention as module
from kvbench.kernels.decode_attention import Arrangement, decode_attention, decode_token, prepare_rows
from kvbench.kernels.layout import locate_rows
from tests.support.ragged_rows import Case, make, rounding
from tests.support.triton_device import DEVICE, needs_loops, on_device, sharing

# Interpreted, bfloat16 can be stored, but neither multiplied nor rounded to.
DTYPES = (torch.float32, torch.float16, *((torch.bfloat16,) if DEVICE == "cuda" else ()))
ROOM = 6


def make_steps(stored: torch.dtype | None, **given: Any) -> Case:
    """Rows with free slots, and new keys and values that are stored as they are."""
    case = make(stored=stored, free_slots=ROOM, **given)
    k, v = (x.to(stored or x.dtype).to(x.dtype) for x in case[1:3])
    return case._replace(k=k, v=v)


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
    like = {"batch": batch, "held": held, "channels": 8, "stored": stored, "device": "cpu"}
    storage = make_steps(folds=1, tokens=1, seed=seed, **like).stored
    spans = [slice(start, start + n) for start, n in zip(storage.layout.offsets.tolist(), held, strict=True)]
    past = [[x[:, span].float() for x in storage[:2]] for span in spans]
    with pytest.MonkeyPatch.context() as patch:
        if arrangement is not None:
            patch.setattr(module, "_choose", lambda *_: arrangement)
        opened, filled = prepare_rows(storage), 0
    for step, end in zip(steps, accumulate(steps), strict=True):
        if end > ROOM:
            break
        q, k, v, _ = make_steps(folds=queries, tokens=step, seed=seed + end, **like)
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
    folds=st.sampled_from((1, 2, 3, 4, 8)),
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
    check_token(make_steps(held=held, dtype=dtype, tokens=1, **given), filled, share, scale)


def check_token(case: Case, filled: int, share: int | None, scale: float) -> None:
    """Assert that a step's token, after `filled` tokens, attends to its row and itself, and is stored behind them."""
    layout, dtype = case.stored.layout, case.q.dtype
    keys, values = case.stored.keys.clone(), case.stored.values.clone()
    came = torch.tensor([filled], device=DEVICE)
    with sharing(share), on_device():
        out = decode_token(*case[:3], locate_rows(case.stored, came), scale)
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
