"""Noise drawn ahead: the numbers of noise drawn when it is needed, by another thread, and no more of them.

Noise by counter: samplers of every family depend on seed, prompt and step alone, recorded or not.
"""

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from scipy import stats
from torch import Tensor

from benchmarks.support.tape import Tape
from kvbench.engine.recording.repetitions import Repetitions
from kvbench.models import noise as module
from kvbench.models.infinity.sampling import Sampling, draw_bits
from kvbench.models.noise import MIN_THREADED, Noise, PromptNoise, draw_ahead, make_noise
from kvbench.models.parts.sampling import TokenSampling, draw_token
from kvbench.models.parts.text_sampling import draw_text_token
from kvbench.models.qwen3.sampling import TextSampling
from kvbench.models.var.sampling import VARSampling, draw_tokens, gumbel_softmax, truncate

CPU = torch.device("cpu")


def test_numbers_and_what_follows_are_the_same() -> None:
    direct, ahead = PromptNoise(3, (5, 9)), PromptNoise(3, (5, 9))
    expected = [direct.draw(MIN_THREADED) for _ in range(4)]
    with draw_ahead(ahead, 2, MIN_THREADED, 4, CPU) as noise:
        found = [noise.draw(MIN_THREADED) for _ in range(4)]
    assert all(map(torch.equal, found, expected))
    assert torch.equal(ahead.draw(7), direct.draw(7))


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
    "var": lambda logits, noise: draw_tokens(truncate(logits, VARSampling(top_k=20)), noise),
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
