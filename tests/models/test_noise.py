"""Noise drawn ahead or by counter, and text tokens: alike whatever the batch, drawn as by transformers' processors."""

import math
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from benchmarks.support.tape import Tape
from kvbench.engine.recording.repetitions import Repetitions
from kvbench.models import noise as module
from kvbench.models.infinity.sampling import Sampling, draw_bits
from kvbench.models.noise import MIN_THREADED, Noise, PromptNoise, draw_ahead, make_noise, prompt_seed
from kvbench.models.parts import text_sampling as sampling_module
from kvbench.models.parts.sampling import TokenSampling, draw_token
from kvbench.models.parts.text_sampling import draw_text_token, mix_exponential, truncate
from kvbench.models.qwen3.sampling import TextSampling
from kvbench.models.var import sampling as var_sampling
from kvbench.models.var.sampling import VARSampling, draw_tokens, gumbel_softmax
from tests.support.drawing import Silence

CPU = torch.device("cpu")


def test_numbers_and_what_follows_are_the_same() -> None:
    direct, ahead = PromptNoise(3, (5, 9)), PromptNoise(3, (5, 9))
    expected = [direct.draw(MIN_THREADED) for _ in range(4)]
    with draw_ahead(ahead, 2, MIN_THREADED, 4, CPU) as noise:
        found = [noise.draw(MIN_THREADED) for _ in range(4)]
    assert all(map(torch.equal, found, expected))
    assert torch.equal(ahead.draw(7), direct.draw(7))
    assert len({prompt_seed(seed, index) for seed in range(30) for index in range(30)}) == 900
    assert torch.equal(PromptNoise(3, (9,)).draw(MIN_THREADED)[0], expected[0][1])  # without threads


class Counting:
    """Counts draws and tells when each has come."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.came = threading.Semaphore(0)

    def draw(self, count: int) -> Tensor:
        self.threads.append(threading.get_ident())
        self.came.release()
        return torch.full((2, count), float(len(self.threads)))


def test_the_next_step_is_drawn_while_this_one_runs() -> None:
    source = Counting()
    with draw_ahead(source, 2, MIN_THREADED, 2, CPU) as noise:
        assert source.came.acquire(timeout=600)  # before it is asked for
        assert noise.draw(MIN_THREADED)[0, 0] == 1
        assert source.came.acquire(timeout=600)
        assert noise.draw(MIN_THREADED)[0, 0] == 2
    assert len(set(source.threads)) == 1
    assert threading.get_ident() not in source.threads
    assert len(source.threads) == 2


def test_few_numbers_and_a_counter_are_not_worth_a_thread() -> None:
    for source, count in ((Counting(), 5), (make_noise("counter", 3, range(2), CPU), MIN_THREADED)):
        with draw_ahead(source, 2, count, 3, CPU) as noise:
            assert noise is source


def test_an_error_comes_where_the_numbers_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "pin", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory to pin")))
    with (
        draw_ahead(Counting(), 2, MIN_THREADED, 2, CPU) as noise,
        pytest.raises(RuntimeError, match="to pin"),
    ):
        noise.draw(MIN_THREADED)


LOGITS = 2 * torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))


def drawn_by(model: str, noise: Noise, rows: Sequence[int] = (0, 1, 2)) -> Tensor:
    """Two draws of a model's sampler for some rows of its logits."""
    return torch.stack([SAMPLERS[model](LOGITS[list(rows)], noise) for _ in range(2)], 1)


SAMPLERS: dict[str, Callable[[Tensor, Noise], Tensor]] = {
    "infinity": lambda logits, noise: draw_bits(logits.unflatten(-1, (-1, 2)), Sampling(), noise),
    "var": lambda logits, noise: draw_tokens(var_sampling.truncate(logits, VARSampling(top_k=20)), noise),
    "var, smooth": lambda logits, noise: gumbel_softmax(logits, 0.5, noise),
    "qwen3": lambda logits, noise: draw_text_token(logits[:, 0], TextSampling(top_k=0), noise),
    "llamagen": lambda logits, noise: draw_token(logits[:, 0], TokenSampling(top_k=9), noise),
    "janus": lambda logits, noise: draw_token(logits[:, 0], TokenSampling(top_k=9, top_p=0.8), noise),
}


@pytest.mark.parametrize("model", SAMPLERS)
def test_draws_by_counter_depend_on_seed_prompt_and_step_alone(model: str) -> None:
    indices = (4, 900, 7)
    together = drawn_by(model, make_noise("counter", 3, indices, CPU))
    for row, index in enumerate(indices):
        alone = drawn_by(model, make_noise("counter", 3, (index,), CPU), (row,))
        assert torch.equal(together[row], alone[0])
    shuffled = drawn_by(model, make_noise("counter", 3, indices[::-1], CPU), (2, 1, 0))
    assert torch.equal(shuffled.flip(0), together)
    assert not torch.equal(together[:, 0], together[:, 1])
    assert not torch.equal(together, drawn_by(model, make_noise("counter", 4, indices, CPU)))


@pytest.mark.parametrize("model", SAMPLERS)
def test_a_recorded_draw_has_new_numbers_at_each_repetition(model: str) -> None:
    """The recording copies the noise of another batch into the places of the first, as graphs do."""
    expected = [drawn_by(model, make_noise("counter", seed, (0, 1, 2), CPU)) for seed in (3, 4)]
    tape, held = Tape(), make_noise("counter", 3, (0, 1, 2), CPU)
    repetitions = Repetitions(tape, lambda: lambda: None)
    repetitions.hold(held)
    out, repeat = tape(lambda: drawn_by(model, held))
    repeat()
    assert torch.equal(out, expected[0])
    repeat()
    assert not torch.equal(out, expected[0])
    assert repetitions.hold(make_noise("counter", 4, (0, 1, 2), CPU)) is held
    repeat()
    assert torch.equal(out, expected[1])


def test_a_model_without_a_program_draws_exponentials() -> None:
    noise = make_noise("counter", 3, (5, 9), CPU)
    first, second = noise.draw(20_000), noise.draw(20_000)
    assert (first.shape, first.dtype) == ((2, 20_000), torch.float32)
    assert torch.equal(make_noise("counter", 3, (9,), CPU).draw(20_000)[0], first[1])
    for one in (first, second):
        assert stats.kstest(one.flatten().double().numpy(), "expon").pvalue > 0.01
    assert abs(torch.corrcoef(torch.stack((first.flatten(), second.flatten())))[0, 1]) < 0.02


def test_greedy_draws_take_the_likeliest() -> None:
    noise, logits = make_noise("counter", 0, (0,), CPU), torch.randn(1, 30, 2)
    bits = draw_bits(logits.view(1, 5, 6, 2), Sampling(top_k=1), noise)
    assert torch.equal(bits.flatten(), (logits[..., 1] > logits[..., 0]).flatten())
    assert torch.equal(draw_token(logits[..., 0], TokenSampling(top_k=1), noise), logits[..., 0].argmax(-1))
    assert not draw_bits(torch.zeros(1, 1, 3, 2), Sampling(top_k=1), noise).any()  # ties are 0


SCORES = 3 * torch.randn(6, 50, generator=torch.Generator().manual_seed(0))


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
        kept, tokens = truncate(SCORES, TextSampling(*setting))
        found = torch.zeros_like(SCORES).scatter(-1, tokens, kept.softmax(-1))
        torch.testing.assert_close(found, official(SCORES, *setting), atol=1e-6, rtol=1e-5)


TIED = torch.tensor([[3.0, *[0.0] * 49]])
ROUNDED = (SCORES.repeat(20, 1) + torch.randn(120, 50, generator=torch.Generator().manual_seed(1))).round()


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
    row = SCORES[:1, :12]
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
    together = draw_text_token(SCORES, sampling, PromptNoise(3, range(6)))
    alone = [draw_text_token(SCORES[i : i + 1], sampling, PromptNoise(3, (i,))) for i in range(6)]
    assert torch.equal(together, torch.cat(alone))
    assert not torch.equal(together, draw_text_token(SCORES, sampling, PromptNoise(4, range(6))))
    many = SCORES.repeat(500, 1)
    shaken = many + 0.01 * torch.randn(many.shape, generator=torch.Generator().manual_seed(5))
    ours, theirs = (draw_text_token(x, sampling, PromptNoise(0, range(len(many)))) for x in (many, shaken))
    assert (ours != theirs).float().mean() < 0.02


def test_temperature_0_takes_the_likeliest_and_no_noise() -> None:
    class Forbidden(Silence):
        def draw(self, count: int) -> Tensor:
            raise AssertionError

    assert torch.equal(draw_text_token(SCORES, TextSampling(0), Forbidden()), SCORES.argmax(-1))
