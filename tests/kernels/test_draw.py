"""Counter-based sampling: the Triton kernels against torch, and sampled codes against their probabilities."""

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from kvbench.kernels.draw import draw_bits, draw_candidate, draw_codes, gumbel_softmax, keep_top
from kvbench.kernels.philox import MIXTURE, draw_integers, make_exponential
from tests.support.triton_device import as_program, needs_loops, needs_triton

KEYS = torch.tensor([2**62 - 3, 17, 0])
STEP = torch.tensor([3])


def random(seed: int, *shape: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def forbid(logits: Tensor) -> Tensor:
    """Forbid every third code, and all but the second of the first token."""
    logits = logits.clone()
    logits[..., ::3] = -math.inf
    logits[0, 0, 2:] = -math.inf
    return logits


SIZES = [(7, 3), (64, 2), (5000, 1), (16_500, 1)]
"""Codes and tokens: fewer than a block, a full block, a partial block, several blocks."""
P = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.01])


@needs_triton
@pytest.mark.parametrize(("codes", "tokens"), SIZES)
def test_the_program_draws_the_same_codes(codes: int, tokens: int) -> None:
    for logits in (random(codes, 3, tokens, codes), forbid(random(codes, 3, tokens, codes))):
        found = as_program(draw_codes)(logits, KEYS, STEP)
        assert torch.equal(found, draw_codes(logits, KEYS, STEP))


@needs_triton
@pytest.mark.parametrize(
    ("codes", "top_k", "temperature_first"),
    [(7, 1, True), (64, 5, True), (64, 90, False), (5000, 300, False), (16_500, 2000, True)],
)
def test_the_program_finds_the_likeliest(codes: int, top_k: int, temperature_first: bool) -> None:
    """Logits that are rounded to tenths have many ties, and a small temperature makes the last logits matter."""
    logits = (random(codes, 2, 1, codes) * 10).round() / 10
    logits[0] = -logits[0].abs()  # the threshold is negative
    limits = 50.0, top_k, temperature_first
    expected = draw_codes(logits, KEYS[:2], STEP, *limits)
    assert torch.equal(as_program(draw_codes)(logits, KEYS[:2], STEP, *limits), expected)
    kept = keep_top(logits, *limits).gather(-1, expected[..., None])
    assert kept.isfinite().all()


def set_of_top_1(first: float, second: float, temperature: float, temperature_first: bool) -> set[int]:
    """Codes that the kernel and torch sample with top-k 1 from two logits and an improbable one."""
    logits = torch.tensor([first, second, -1.0]).expand(3, 1, 3)
    limits = temperature, 1, temperature_first
    found = as_program(draw_codes)(logits, KEYS, STEP, *limits)
    assert torch.equal(found, draw_codes(logits, KEYS, STEP, *limits))
    return set(found.flatten().tolist())


@needs_triton
def test_zeros_of_both_signs_are_ties_and_logits_that_a_temperature_makes_equal_if_it_comes_first() -> None:
    assert set_of_top_1(0.0, -0.0, 1.0, temperature_first=True) == {0, 1}
    steps = 1.5 + 2**-23 * torch.arange(64)
    place = int((steps / 1.5).diff().argmin())
    assert steps[place] / 1.5 == steps[place + 1] / 1.5
    pair = float(steps[place]), float(steps[place + 1])
    assert set_of_top_1(*pair, 1.5, temperature_first=True) == {0, 1}
    assert set_of_top_1(*pair, 1.5, temperature_first=False) == {1}


@needs_triton
def test_logits_that_are_not_finite_give_a_code() -> None:
    """The model's check of its logits must be reached."""
    logits = torch.full((3, 2, 9), math.nan)
    found = as_program(draw_codes)(logits, KEYS, STEP)
    assert found.min() >= 0
    assert found.max() < 9


@needs_loops
@pytest.mark.parametrize("count", [1, 20, 256, 2500])
def test_the_program_draws_the_same_candidate(count: int) -> None:
    codes = torch.stack([torch.randperm(150_000)[:count] for _ in range(3)])
    logits = random(count, 3, count).sort(descending=True).values
    logits[:, max(1, count // 2) :] = -math.inf
    found = as_program(draw_candidate)(logits, codes, KEYS, STEP)
    assert torch.equal(found, draw_candidate(logits, codes, KEYS, STEP))


@needs_triton
@pytest.mark.parametrize(("tokens", "bits"), [(1, 8), (50, 14), (100, 32)])
def test_the_program_draws_the_same_bits(tokens: int, bits: int) -> None:
    from kvbench.kernels.triton.draw import draw_bits_triton

    logits = random(bits, 3, tokens, bits, 2)
    p = logits.softmax(-1)
    rare = torch.where(p <= 0.03, 0.0, p)
    expected = draw_bits((rare / rare.sum(-1, keepdim=True))[..., 1], KEYS, STEP)
    found = as_program(draw_bits_triton)(logits, KEYS, STEP, 0.03)
    assert torch.equal(found, expected)
    assert not found[p[..., 1] <= 0.03].any()
    assert found[p[..., 0] <= 0.03].all()


@needs_triton
@pytest.mark.parametrize(("codes", "tokens"), SIZES)
def test_the_program_mixes_the_same_codes(codes: int, tokens: int) -> None:
    logits = forbid(random(codes, 3, tokens, codes))
    logits[1, 0, : codes // 2] = -math.inf  # a whole piece without a code
    found = as_program(gumbel_softmax)(logits, KEYS, STEP, 1.5, 0.2)
    torch.testing.assert_close(found, gumbel_softmax(logits, KEYS, STEP, 1.5, 0.2), atol=1e-6, rtol=1e-5)
    gumbel = -make_exponential(draw_integers(KEYS, STEP, MIXTURE, tokens, codes)).double().log()
    exact = ((1.5 * logits.double() + gumbel) / 0.2).softmax(-1)
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-4)


def check_law(drawn: Tensor, p: Tensor) -> None:
    """Chi-square of drawn codes against their probabilities."""
    counts = torch.bincount(drawn.flatten(), minlength=len(p))
    used, p = p > 0, p.double() / p.double().sum()
    assert not counts[~used].any()
    assert stats.chisquare(counts[used].numpy(), (p[used] * drawn.numel()).numpy()).pvalue > 0.01


def test_codes_candidates_and_bits_follow_their_probabilities() -> None:
    keys, logits = torch.arange(50), P.log().expand(50, 400, -1)
    check_law(draw_codes(logits, keys, STEP), P)
    check_law(draw_codes(logits, keys, STEP, 1.0, 4), torch.cat((P[:4], torch.zeros(2))))
    check_law(draw_codes(logits, keys, STEP, 2.0), P.sqrt() / P.sqrt().sum())
    codes = torch.tensor([70_000, 3, 150_000, 12, 9, 4])
    drawn = draw_candidate(P.log().expand(20_000, -1), codes.expand(20_000, -1), torch.arange(20_000), STEP)
    check_law((drawn[:, None] == codes).int().argmax(-1), P)
    for p in (0.02, 0.5, 0.9):
        drawn = draw_bits(torch.full((10, 500, 4), p), torch.arange(10), STEP)
        assert stats.binomtest(int(drawn.sum()), drawn.numel(), p).pvalue > 0.01


def test_equally_likely_codes_of_a_large_vocabulary() -> None:
    """A coarse generator prefers the first of many codes, since ties fall to it."""
    assert len(draw_codes(torch.zeros(4, 1, 184_000), torch.arange(4), STEP).unique()) == 4
    zeros, keys = torch.zeros(8, 32, 4096), torch.arange(8)
    many = torch.cat([draw_codes(zeros, keys, torch.tensor([step])) for step in range(8)])
    assert stats.kstest(many.flatten().numpy() / 4096, "uniform").pvalue > 0.01
