"""Linear, modulate and qk_norm_rope: equal to their definitions in float64, on a CPU and as Triton kernels."""

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels import modulate, products, qk_norm_rope
from kvbench.kernels.linear import linear
from tests.support.triton_device import DEVICE, both, random

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
CPU = torch.device("cpu")
SINGLE = torch.finfo(torch.float32).eps


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, through: Tensor) -> None:
    """Element by element equal up to float32 rounding of the values passed `through` and one rounding to `dtype`.

    A sum that cancels is only as exact as its terms, so their size bounds the error and not the result's.
    """
    bound = 4 * SINGLE * through + torch.finfo(dtype).eps * expected.abs()
    excess = (found.cpu().double() - expected).abs() / bound.clamp_min(1e-30)
    assert excess.max() <= 1, excess.max()


@given(
    st.integers(0, 2**20), st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.integers(1, 40), st.integers(1, 40), st.booleans(), st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_linear(seed: int, rows: list[int], width: int, out: int, bias: bool, gelu: bool) -> None:
    x, weight, b = random(seed, *rows, width), random(seed + 1, out, width), random(seed + 2, out)
    found = linear(x, weight, b if bias else None, gelu=gelu)
    expected = x.double() @ weight.double().T + (b.double() if bias else 0)
    through = x.double().abs() @ weight.double().abs().T + (b.double().abs() if bias else 0)
    close(found, F.gelu(expected, approximate="tanh") if gelu else expected, torch.float32, through)
    assert found.shape == (*rows, out)


@given(st.integers(0, 2**20), st.integers(1, 20), st.integers(1, 90), st.integers(1, 90), st.integers(1, 90))
@settings(max_examples=60, deadline=None)
def test_onednn_products_are_exact(seed: int, batch: int, rows: int, inner: int, columns: int) -> None:
    first, second = random(seed, batch, rows, inner), random(seed + 1, batch, columns, inner).mT
    with products.onednn_products(products.MIN_MULTIPLICATIONS, CPU):
        found = first @ second
    first, second = first.double(), second.double()
    close(found, first @ second, torch.float32, first.abs() @ second.abs())


@pytest.mark.parametrize("exact", [True, False])
def test_products_elsewhere_are_left_alone(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_is_exact", lambda: exact)
    before = products.MATMUL_SETTINGS.fp32_precision
    with products.onednn_products(products.MIN_MULTIPLICATIONS - 1, CPU):
        assert products.MATMUL_SETTINGS.fp32_precision == before
    with suppress(KeyError), products.onednn_products(products.MIN_MULTIPLICATIONS, CPU):
        assert (products.MATMUL_SETTINGS.fp32_precision == "bf16") == exact
        raise KeyError
    assert products.MATMUL_SETTINGS.fp32_precision == before


@pytest.mark.skipif(DEVICE != "cuda", reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_is_fused_on_a_gpu(dtype: torch.dtype) -> None:
    x, weight, bias = (
        random(i, *size).to(DEVICE, dtype) for i, size in enumerate([(2, 5, 64), (32, 64), (32,)])
    )
    with torch.no_grad():
        found = linear(x, weight, bias, gelu=True)
    exact = x.double() @ weight.double().T + bias.double()
    through = (x.double().abs() @ weight.double().abs().T + bias.double().abs()).cpu()
    close(found, F.gelu(exact, approximate="tanh").cpu(), dtype, through)
    assert found.shape == (2, 5, 32)


@both(modulate.modulate)
@given(
    st.integers(0, 2**20), st.integers(1, 3), st.integers(1, 5), st.integers(2, 150), DTYPES, DTYPES, DTYPES
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_modulate(
    program: Callable[..., Tensor], seed: int, batch: int, tokens: int, width: int,
    stream: torch.dtype, condition: torch.dtype, dtype: torch.dtype,
) -> None:  # fmt: skip
    """The definition in double precision, as close as the size of intermediate values allows."""
    x = (3 * random(seed, batch, tokens, width) + 1).to(stream)
    factor, shift = random(seed + 1, batch, 1, 6, width).to(condition).unbind(2)[2:4]
    found = program(x, factor, shift, dtype)
    assert found.dtype == dtype
    x, factor, shift = x.double(), factor.double(), shift.double()
    deviation = (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    through = x.abs().amax(-1, keepdim=True) / deviation * factor.abs() + shift.abs()
    close(found, (x - x.mean(-1, keepdim=True)) / deviation * factor + shift, dtype, through)


def test_modulate_learns_after_inference() -> None:
    x = random(0, 2, 3, 177)
    with torch.inference_mode():
        modulate.modulate(x, x[:, :1], x[:, :1], torch.float32)
    factor = x[:, :1].clone().requires_grad_()
    modulate.modulate(x, factor, x[:, :1], torch.float32).sum().backward()
    assert factor.grad is not None


def turned(qkv: Tensor, lengths: Tensor, angles: Tensor | None) -> tuple[Tensor, ...]:
    """By two-by-two matrices."""
    q, k, v = qkv.double().permute(2, 0, 3, 1, 4)
    parts = []
    for x, length in zip((q, k), lengths.double(), strict=True):
        x = x / x.norm(dim=-1, keepdim=True) * length[:, None, None]
        if angles is not None:
            a = angles.double()
            turn = torch.stack((a.cos(), -a.sin(), a.sin(), a.cos()), -1).unflatten(-1, (2, 2))
            x = (turn @ x.unflatten(-1, (-1, 2, 1))).flatten(-3)
        parts.append(x)
    return (*parts, v)


@both(qk_norm_rope.qk_norm_rope)
@given(
    st.integers(0, 2**20), st.integers(1, 3), st.integers(1, 40), st.integers(1, 3),
    st.sampled_from([16, 24, 64]), DTYPES, st.booleans(), st.booleans(),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_qk_norm_rope(
    program: Callable[..., tuple[Tensor, ...]], seed: int, batch: int, tokens: int, heads: int, dim: int,
    dtype: torch.dtype, rotate: bool, learns: bool,
) -> None:  # fmt: skip
    """Without gradients, as a kernel runs, the projection is overwritten."""
    qkv = random(seed, batch, tokens, 3, heads, dim).to(dtype)
    lengths = torch.stack((random(seed + 1, heads).exp(), torch.ones(heads)))
    angles = random(seed + 2, tokens, dim // 2) if rotate else None
    rotation = None if angles is None else torch.polar(torch.ones_like(angles), angles)
    given = qkv.clone()
    with torch.set_grad_enabled(learns):
        found = program(given, lengths, rotation)
    if DEVICE == "cpu" and not (learns and program is qk_norm_rope.qk_norm_rope):
        assert all(part.data_ptr() == given[:, :, index].data_ptr() for index, part in enumerate(found))
    for part, expected in zip(found, turned(qkv, lengths, angles), strict=True):
        assert part.dtype == dtype
        assert part.shape == (batch, heads, tokens, dim)
        close(part, expected, dtype, expected.norm(dim=-1, keepdim=True))
