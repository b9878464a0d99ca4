"""Norms, rotation and gate of the decoder: exact to double precision, and rounded where the official code rounds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.kernels import qk_norm_rope, rms_norm, swiglu
from kvbench.kernels.qk_norm_rope import HeadNorms
from tests.support.triton_device import DEVICE, both, random

HALVES = [torch.bfloat16, torch.float16]
Program = Callable[..., Any]


def skip_truncation(program: Program, dtype: torch.dtype) -> None:
    """Skip a kernel in Triton's interpreter, which truncates values where kernels round to bfloat16."""
    if DEVICE == "cpu" and program.__name__ == "by_triton" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter cuts numbers off where they are rounded to bfloat16")


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def same(found: Tensor, expected: Tensor) -> None:
    """Equal except for few values halfway between two, which may differ by one unit in the last place.

    A rounding that is missing, or in another place, changes a quarter of all numbers.
    """
    found = found.cpu()
    assert found.dtype == expected.dtype
    differ = found != expected
    assert differ.float().mean() < 0.01, differ.float().mean()
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(found.dtype).eps, atol=1e-6)


@both(rms_norm.rms_norm)
@given(st.integers(0, 2**20), st.integers(1, 3), st.integers(2, 300), st.sampled_from([1e-6, 0.3]))
@settings(max_examples=20, deadline=None)
def test_rms_norm(program: Program, seed: int, rows: int, width: int, eps: float) -> None:
    x, weight = 3 * random(seed, rows, 2, width)[:, -1], random(seed + 1, width)
    found = program(x, weight, eps).cpu().double()
    torch.testing.assert_close(found, exact_norm(x, weight, eps), rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", HALVES)
@both(rms_norm.add_rms_norm)
def test_sum_and_norm_are_rounded_apart(program: Program, dtype: torch.dtype) -> None:
    skip_truncation(program, dtype)
    x, h, weight = ((one * random(one, 64, 200)).to(dtype) for one in (1, 2, 3))
    weight = weight[0]
    stream, normed = program(x, h, weight, 1e-5)
    assert torch.equal(stream.cpu(), x + h)
    single = (x + h).float()
    scaled = single * torch.rsqrt(single.square().mean(-1, keepdim=True) + 1e-5)
    same(normed, scaled.to(dtype) * weight)


@both(swiglu.silu_mul)
@given(st.integers(0, 2**20), st.integers(1, 5), st.integers(1, 700))
@settings(max_examples=12, deadline=None)
def test_gate(program: Program, seed: int, rows: int, width: int) -> None:
    joint = random(seed, 2, rows, 2 * width)
    first, second = joint.chunk(2, -1)
    # Halves of a product, then any strides.
    for gate, x in ((first, second), (9 * first.contiguous(), second.mT.contiguous().mT)):
        expected = gate.double() / (1 + (-gate.double()).exp()) * x.double()
        found = program(gate, x)
        assert found.is_contiguous()
        torch.testing.assert_close(found.cpu().double(), expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", HALVES)
@both(swiglu.silu_mul)
def test_gate_is_rounded_before_the_product(program: Program, dtype: torch.dtype) -> None:
    skip_truncation(program, dtype)
    gate, x = (random(one, 40, 300).to(dtype) for one in (1, 2))
    single = gate.float() / (1 + (-gate.float()).exp())
    same(program(gate, x), single.to(dtype) * x)


def norms_of(kind: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> HeadNorms | None:
    if kind == "none":
        return None
    sizes = (dim, dim) if kind == "rms" else (heads * dim, kv_heads * dim)
    weights = [random(10 + index, size).to(dtype) for index, size in enumerate(sizes)]
    biases = [random(20 + index, size).to(dtype) for index, size in enumerate(sizes)]
    return HeadNorms(*weights, *(biases if kind == "layer" else (None, None)), 1e-5)


def expect_head(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, angles: Tensor, dtype: torch.dtype
) -> Tensor:
    """One head [B, tokens, D] in double precision; of an RMS norm rounded to `dtype` before and after the weight."""
    x = x.double()
    if weight is not None and bias is None:
        x = exact_norm(x, torch.ones_like(weight), 1e-5).to(dtype).double()
        x = (x * weight.double()).to(dtype).double()
    elif weight is not None and bias is not None:
        x = x - x.mean(-1, keepdim=True)
        x = exact_norm(x, weight, 1e-5) + bias.double()
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.double().cos(), angles.double().sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("kind", ["none", "rms", "layer"])
@pytest.mark.parametrize(("batch", "tokens", "dim"), [(3, 1, 64), (2, 21, 24), (1, 2, 100)])
@both(qk_norm_rope.grouped_norm_rope)
def test_heads(program: Program, batch: int, tokens: int, dim: int, kind: str, dtype: torch.dtype) -> None:
    skip_truncation(program, dtype)
    heads, kv_heads = 6, 2
    joint = random(0, batch, tokens, heads + 2 * kv_heads, dim).to(dtype)
    given, norms = joint.clone(), norms_of(kind, heads, kv_heads, dim, dtype)
    angles = random(1, tokens, dim // 2)
    q, k, v = program(joint, kv_heads, norms, torch.polar(torch.ones_like(angles), angles))
    assert torch.equal(joint, given)  # queries as projected are read later
    assert torch.equal(v.cpu(), given[:, :, heads + kv_heads :].transpose(1, 2))
    for found, first, weight, bias in (
        (q, 0, norms and norms.q_weight, norms and norms.q_bias),
        (k, heads, norms and norms.k_weight, norms and norms.k_bias),
    ):
        for head in range(found.shape[1]):
            own = slice(head * dim, (head + 1) * dim)
            parts = (weight, bias) if bias is None else (weight[own], bias[own])
            expected = expect_head(given[:, :, first + head], *parts, angles, dtype)
            if dtype == torch.float32:
                torch.testing.assert_close(found[:, head].cpu().double(), expected, rtol=1e-5, atol=2e-6)
            else:
                same(found[:, head], expected.to(dtype))
