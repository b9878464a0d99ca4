"""Attention of new tokens over rows of unequal length: however rows are arranged, it is each row's own."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.kernels.decode_attention import Arrangement, decode_attention, prepare_rows
from kvbench.kernels.layout import Past, arrange_rows
from tests.support.reference_attention import attention

D, ROOM, SCALE = 8, 6, 0.4


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=7),
    steps=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    batch=st.integers(1, 2),
    folds=st.integers(1, 2),
    arrangement=st.sampled_from((None, "together", "grouped", "padded")),
    half=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_row_attends_to_its_own_tokens(
    lengths: list[int], steps: list[int], batch: int, folds: int, arrangement: Arrangement | None, half: bool
) -> None:
    steps = [step for index, step in enumerate(steps) if sum(steps[: index + 1]) <= ROOM]
    generator = torch.Generator().manual_seed(sum(lengths))
    dtype = torch.bfloat16 if half else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).float()

    rows, longest = len(lengths), max(lengths)
    held = torch.arange(longest).expand(rows, -1)
    positions = held.masked_fill(held >= torch.tensor(lengths)[:, None], -1)
    layout = arrange_rows(positions, lengths, ROOM)
    keys, values = (normal(batch, layout.capacity, D).to(dtype) for _ in range(2))
    past = [
        [x[:, start : start + length].float() for x in (keys, values)]
        for start, length in zip(layout.offsets.tolist(), lengths, strict=True)
    ]
    opened, filled = prepare_rows(Past(keys, values, layout), arrangement), 0
    for step in steps:
        q, k, v = (normal(batch, rows, count, D) for count in (folds * step, step, step))
        found = decode_attention(q, k, v, opened, filled, SCALE)
        filled += step
        for row in range(rows):
            present = [x[:, row] for x in (k, v)]
            expected, _ = attention(q[:, row], past[row], present, SCALE, causal=True)
            torch.testing.assert_close(found[:, row].double(), expected, atol=2e-5, rtol=1e-4)
            past[row] = [torch.cat(pair, 1) for pair in zip(past[row], present, strict=True)]
