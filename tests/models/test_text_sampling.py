"""Tokens are drawn from the distribution that transformers' processors leave, and alike by runs that are alike."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.models.noise import PromptNoise
from kvbench.models.parts import text_sampling as sampling_module
from kvbench.models.parts.text_sampling import draw_text_token, mix_exponential, truncate
from kvbench.models.qwen3.sampling import TextSampling
from tests.support.drawing import Silence

LOGITS = 3 * torch.randn(6, 50, generator=torch.Generator().manual_seed(0))


def official(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Probabilities after the processors of transformers' `generate`."""
    transformers = pytest.importorskip("transformers")
    chain = [transformers.TemperatureLogitsWarper(temperature)]
    chain += [transformers.TopKLogitsWarper(top_k)] if top_k else []
    chain += [transformers.TopPLogitsWarper(top_p)] if top_p < 1 else []
    for process in chain:
        logits = process(None, logits)
    return logits.softmax(-1)


def test_candidates_have_the_official_probabilities() -> None:
    for setting in (
        (0.6, 20, 0.95), (1.0, 0, 0.8), (1.3, 7, 1.0), (0.7, 0, 1.0), (1.0, 1, 0.5), (1.0, 90, 0.3)
    ):  # fmt: skip
        kept, tokens = truncate(LOGITS, TextSampling(*setting))
        found = torch.zeros_like(LOGITS).scatter(-1, tokens, kept.softmax(-1))
        torch.testing.assert_close(found, official(LOGITS, *setting), atol=1e-6, rtol=1e-5)


TIED = torch.tensor([[3.0, *[0.0] * 49]])
ROUNDED = (LOGITS.repeat(20, 1) + torch.randn(120, 50, generator=torch.Generator().manual_seed(1))).round()


@pytest.mark.parametrize("wider", [False, True])
def test_ties_with_the_last_of_top_k_stay(wider: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `wider`, as on a GPU, a fixed number of candidates is looked at."""
    if wider:
        monkeypatch.setattr(sampling_module, "_count_candidates", lambda logits, *_: logits.shape[-1])
    for logits, top_k in ((TIED, 1), (TIED, 3), (ROUNDED, 1), (ROUNDED, 7), (ROUNDED, 0)):
        kept, tokens = truncate(logits, TextSampling(0.6, top_k, 1.0))
        found = torch.zeros_like(logits).scatter(-1, tokens, kept.softmax(-1))
        torch.testing.assert_close(found, official(logits, 0.6, top_k, 1.0), atol=1e-6, rtol=1e-5)


@given(st.integers(0, 10**6), st.integers(0, 8), st.sampled_from([0.313, 0.553, 0.817, 0.973]))
@settings(deadline=None)
def test_of_ties_at_the_end_of_top_p_the_highest_numbers_stay(seed: int, top_k: int, top_p: float) -> None:
    """Word by word: the likeliest first, of equal ones the highest number, until their probability reaches top_p."""
    logits = torch.randint(0, 5, (1, 12), generator=torch.Generator().manual_seed(seed)).float()
    ranked = sorted(range(12), key=lambda word: (-float(logits[0, word]), -word))
    allowed = [word for word in ranked if not top_k or logits[0, word] >= logits[0, ranked[top_k - 1]]]
    weights = {word: math.exp(float(logits[0, word])) for word in allowed}
    expected, total = [], 0.0
    for word in allowed:
        if total < (top_p - 1e-6) * sum(weights.values()):
            expected.append(word)
        total += weights[word]
    kept, tokens = truncate(logits, TextSampling(1.0, top_k, top_p))
    assert tokens[kept.isfinite()].tolist() == expected


def test_tokens_are_drawn_as_often_as_they_should_be() -> None:
    count, sampling = 40_000, TextSampling(1.0, 8, 0.9)
    row = LOGITS[:1, :12]
    noise = PromptNoise(0, range(count))
    drawn = draw_text_token(row.expand(count, -1), sampling, noise)
    found = drawn.bincount(minlength=12) / count
    expected = official(row, 1.0, 8, 0.9)[0]
    assert (found - expected).abs().max() < 4 * (0.25 / count) ** 0.5
    assert (found[expected == 0] == 0).all()


def test_numbers_of_tokens_are_exponential_and_independent() -> None:
    drawn = PromptNoise(1, range(500)).draw(2)
    waits = mix_exponential(torch.arange(400).expand(500, -1), drawn)
    assert waits.dtype == torch.float32
    assert (waits > 0).all()
    assert torch.isfinite(waits).all()
    values = waits.flatten().double().sort().values
    expected = 1 - (-values).exp()
    steps = torch.arange(1, len(values) + 1) / len(values)
    assert (steps - expected).abs().max() < 1.63 / len(values) ** 0.5  # Kolmogorov-Smirnov at 1 %
    for shift in (1, 7, 256):  # neighbours among tokens, and the same token at two prompts
        pairs = torch.stack((waits[:, shift:].flatten(), waits[:, :-shift].flatten()))
        assert pairs.corrcoef()[0, 1].abs() < 4 / pairs.shape[1] ** 0.5
        pairs = torch.stack((waits[shift % 500 :].flatten(), waits[: 500 - shift % 500].flatten()))
        assert pairs.corrcoef()[0, 1].abs() < 4 / pairs.shape[1] ** 0.5


def test_an_excluded_token_is_not_sampled_where_its_mixed_bits_are_all_ones() -> None:
    token, numbers = 146_730, torch.tensor([[0.7442367076873779, 0.5285049676895142]])

    class Given(Silence):
        def draw(self, count: int) -> Tensor:
            return numbers[:, :count]

    assert 0 < mix_exponential(torch.tensor([[token]]), numbers).item() < 1e-7
    logits = torch.zeros(1, token + 1)
    logits[0, token] = -20
    assert draw_text_token(logits, TextSampling(1.0, 0, 0.9), Given()).item() < token


def test_a_prompt_draws_the_same_in_any_batch_and_nearly_the_same_from_nearly_the_same() -> None:
    sampling = TextSampling(1.0, 0, 1.0)
    together = draw_text_token(LOGITS, sampling, PromptNoise(3, range(6)))
    alone = [draw_text_token(LOGITS[i : i + 1], sampling, PromptNoise(3, (i,))) for i in range(6)]
    assert torch.equal(together, torch.cat(alone))
    assert not torch.equal(together, draw_text_token(LOGITS, sampling, PromptNoise(4, range(6))))
    many = LOGITS.repeat(500, 1)
    shaken = many + 0.01 * torch.randn(many.shape, generator=torch.Generator().manual_seed(5))
    ours, theirs = (draw_text_token(x, sampling, PromptNoise(0, range(len(many)))) for x in (many, shaken))
    assert (ours != theirs).float().mean() < 0.02


def test_temperature_0_takes_the_likeliest_and_no_noise() -> None:
    class Forbidden(Silence):
        def draw(self, count: int) -> Tensor:
            raise AssertionError

    assert torch.equal(draw_text_token(LOGITS, TextSampling(0), Forbidden()), LOGITS.argmax(-1))
