"""Triton kernels, on a GPU or interpreted, against double precision row by row."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.ragged_rows import CASES, HALF, check, check_mass, make
from tests.support.triton_device import DEVICE, needs_loops, sharing

pytest.importorskip("triton")

from kvbench.kernels.layout import locate_rows
from kvbench.kernels.triton.attention_mass import attention_mass_triton
from kvbench.kernels.triton.decode_attention import decode_attention_triton
from kvbench.kernels.triton.ragged_attention import ragged_attention_triton


@needs_loops
@given(
    **CASES,
    stored=st.sampled_from((None, torch.bfloat16, torch.float32)),
    causal=st.booleans(),
    share=st.sampled_from((None, 1, 2, 3)),
    scale=st.sampled_from((1.0, 0.2)),
)
@example(  # blocks of queries end amid a head's tokens
    batch=1, held=[5], folds=3, tokens=70, channels=16, dtype=torch.float32, strided=True, apart=False, seed=0,
    stored=None, causal=True, share=1, scale=1.0,
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_attention(
    stored: torch.dtype | None, causal: bool, share: int | None, scale: float, **given: object
) -> None:
    case = make(**given, stored=stored)
    with sharing(share):
        check(ragged_attention_triton(*case, scale, causal=causal), case, scale, causal)


@needs_loops
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_heads_of_a_multiple_of_four_channels(dtype: torch.dtype) -> None:
    """As LlamaGen-3B's: their rows start on eight bytes."""
    case = make(1, [5, 0, 70], 2, 9, 100, dtype=dtype)
    for share in (None, 2):
        with sharing(share):
            check(ragged_attention_triton(*case, 0.1, causal=True), case, 0.1, True)
    check_mass(attention_mass_triton(case.q, case.k, case.stored, 0.1), case, 0.1, 1, False)


@needs_loops
@pytest.mark.parametrize("share", [None, 1, 3])
def test_attention_without_a_present(share: int | None) -> None:
    case = make(1, [1, 40, 70, 33], 2, 7, 24)
    nothing = case.stored.keys[:, None, :0].expand(-1, 4, -1, -1)
    case = case._replace(k=nothing, v=nothing)
    with sharing(share):
        check(ragged_attention_triton(*case, 0.3), case, 0.3)


@needs_loops
@given(**CASES, power=st.sampled_from((1, 2)), known=st.booleans(), causal=st.booleans())
@settings(max_examples=30, deadline=None)
@pytest.mark.slow
def test_mass(tokens: int, folds: int, power: int, known: bool, causal: bool, **given: object) -> None:
    case = make(**given, tokens=tokens, folds=folds)
    lse = ragged_attention_triton(*case, 0.3, causal=causal)[1] if known else None
    last = torch.arange(tokens, dtype=torch.int32, device=DEVICE).repeat(folds) if causal else None
    mass = attention_mass_triton(case.q, case.k, case.stored, 0.3, power=power, lse=lse, tokens=last)
    check_mass(mass, case, 0.3, power, causal)


@needs_loops
def test_rows_that_start_anywhere_are_copied_first() -> None:
    case = make(1, [5, 2], 1, 3, 16)
    wide = torch.randn(1, 2, 3, 17, device=DEVICE)
    odd = case._replace(q=wide[..., 1:])
    plain = case._replace(q=wide[..., 1:].contiguous())
    found, expected = (ragged_attention_triton(*one, 1.0) for one in (odd, plain))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    with pytest.raises(ValueError, match="head dim 6: kernels on CUDA need a multiple of 4"):
        ragged_attention_triton(*make(1, [2], 1, 2, 6), 1.0)


@needs_loops
def test_large_scores_do_not_overflow() -> None:
    q, k, v, stored = make(1, [40, 1], 1, 3, 16, free_slots=1)
    q, k, stored = 20 * q, 20 * k, stored._replace(keys=20 * stored.keys)
    rows = locate_rows(stored, torch.tensor([0], device=DEVICE))
    for share in (1, 2):
        with sharing(share):
            assert all(torch.isfinite(part).all() for part in ragged_attention_triton(q, k, v, stored, 1.0))
            assert torch.isfinite(decode_attention_triton(q, k[:, :, :1], v[:, :, :1], rows, 1.0)).all()
    mass = attention_mass_triton(q, k, stored, 1.0)
    torch.testing.assert_close(mass.sum(-1), torch.ones_like(mass.sum(-1)), atol=1e-3, rtol=0)
