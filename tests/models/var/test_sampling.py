"""VAR's sampling: the official truncation and draw, guidance that grows, and the smooth mixture."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.models.noise import PromptNoise
from kvbench.models.var.sampling import VARSampling, draw_tokens, guide, mix_codes, truncate
from tests.support.reference import OneStream
from tests.support.reference_var import golden, meta


@pytest.mark.parametrize("number", range(8))
def test_equals_the_official_sampler(number: int) -> None:
    combination, expected = meta()["sampler_combos"][number], golden("sampler")
    sampling = VARSampling(top_k=combination["top_k"], top_p=combination["top_p"])
    found = truncate(expected["logits"], sampling)
    assert torch.equal(found, expected[f"filtered.{number}"])
    tokens = draw_tokens(found, OneStream(combination["seed"], len(found)))
    assert torch.equal(tokens, expected[f"idx.{number}"].squeeze(-1))


def random_logits(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def test_ties_with_the_last_of_top_k_are_kept() -> None:
    logits = torch.tensor([[[1.0, 3.0, 2.0, 2.0, 0.0]]])
    kept = truncate(logits, VARSampling(top_k=2, top_p=0)).isfinite()
    assert kept.flatten().tolist() == [False, True, True, True, False]


@given(
    seed=st.integers(0, 10**6), prompts=st.integers(1, 3), tokens=st.integers(1, 5), codes=st.integers(1, 9)
)
def test_a_draw_is_torch_multinomial(seed: int, prompts: int, tokens: int, codes: int) -> None:
    logits = random_logits(seed, prompts, tokens, codes)
    drawn = draw_tokens(logits, OneStream(seed, prompts))
    p = logits.softmax(-1).view(-1, codes)
    expected = torch.multinomial(p, 1, replacement=True, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(drawn, expected.view(prompts, tokens))


def test_guidance_grows_with_the_scale() -> None:
    both = random_logits(0, 4, 3, 5)
    conditional, unconditional = both.chunk(2)
    assert torch.equal(guide(both, 1.5, 0.0), conditional)
    expected = conditional + 0.75 * (conditional - unconditional)
    torch.testing.assert_close(guide(both, 1.5, 0.5), expected)


@given(seed=st.integers(0, 10**6), progress=st.floats(0, 1))
def test_a_mixture_sums_to_one_over_what_may_be_drawn(seed: int, progress: float) -> None:
    logits = truncate(random_logits(seed, 2, 3, 20), VARSampling(top_k=4, top_p=0))
    found = mix_codes(logits, progress, PromptNoise(seed, (0, 1)))
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 3))
    assert (found[torch.isinf(logits)] == 0).all()


def test_late_mixtures_are_nearly_draws() -> None:
    logits = random_logits(1, 1, 4000, 6)
    sharpest = [float(mix_codes(logits, p, PromptNoise(0, (0,))).amax(-1).mean()) for p in (0.0, 0.5, 1.0)]
    assert sharpest == sorted(sharpest)
    assert sharpest[-1] > 0.98
