"""Group norm and SiLU: equal to their definition in float64, rounded once or twice, on a CPU and as Triton kernels."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvbench.kernels.group_norm import group_norm
from tests.support.triton_device import as_program, both, needs_triton, random

EPSILON = 1e-6
Program = Callable[..., Tensor]


def exact(x: Tensor, groups: int, weight: Tensor, bias: Tensor, silu: bool, rounded: torch.dtype) -> Tensor:
    """The definition in float64, the norm rounded to a dtype before SiLU."""
    parts = x.double().unflatten(1, (groups, -1)).flatten(2)
    centred = parts - parts.mean(-1, keepdim=True)
    norm = (centred / (centred.square().mean(-1, keepdim=True) + EPSILON).sqrt()).view(x.shape)
    norm = (norm * weight.double()[:, None, None] + bias.double()[:, None, None]).to(rounded).double()
    return norm / (1 + (-norm).exp()) if silu else norm


def draw_image(*shape: int) -> Tensor:
    """Values [B, C, H, W] in the memory order that the kernels accept."""
    return random(0, *shape).to(memory_format=torch.channels_last)


@both(group_norm)
@pytest.mark.parametrize(
    ("channels", "groups", "size", "silu"),
    [
        (32, 32, (2, 2), False), (96, 24, (5, 7), True), (160, 32, (29, 23), True), (128, 1, (9, 8), False),
        (640, 32, (11, 3), True),
    ],
)  # fmt: skip
def test_it_is_exact(program: Program, channels: int, groups: int, size: tuple[int, int], silu: bool) -> None:
    x = 2 * draw_image(2, channels, *size) + random(1, 2, channels, 1, 1)
    weight, bias = random(2, channels), random(3, channels)
    found = program(x, groups, weight, bias, EPSILON, silu=silu)
    expected = exact(x, groups, weight, bias, silu, torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-5)
    assert found.is_contiguous(memory_format=torch.channels_last)


@both(group_norm)
@pytest.mark.parametrize("weights", [torch.float32, torch.float16])
def test_it_is_rounded_once_or_with_its_weights(program: Program, weights: torch.dtype) -> None:
    """Weights in float32 round the result alone; weights in 16 bits round the norm, too."""
    x = draw_image(2, 96, 9, 11).half()
    weight, bias = random(1, 96).to(weights), random(2, 96).to(weights)
    found = program(x, 24, weight, bias, EPSILON, silu=True)
    expected = exact(x, 24, weight, bias, True, weights).half()
    assert found.dtype == torch.float16
    assert (found != expected).double().mean() < 0.01  # halfway between two numbers
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-6)


@needs_triton
def test_far_from_zero_and_over_many_parts_it_stays_exact() -> None:
    """A sum of squares in float32 would be wrong in the second digit of a variance of 1 at a mean of 500."""
    x = draw_image(1, 32, 60, 70) + 500
    weight, bias = random(1, 32), random(2, 32)
    found = as_program(group_norm)(x, 32, weight, bias, EPSILON)
    expected = exact(x, 32, weight, bias, False, torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


@needs_triton
def test_an_image_s_numbers_do_not_depend_on_its_batch() -> None:
    x, ones, zeros = draw_image(3, 64, 40, 40), torch.ones(64), torch.zeros(64)
    one, three = (as_program(group_norm)(part, 32, ones, zeros, EPSILON, silu=True) for part in (x[1:2], x))
    assert torch.equal(three[1:2], one)
