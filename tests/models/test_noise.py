"""Noise drawn ahead: the numbers of noise drawn when it is needed, by another thread, and no more of them."""

import threading

import pytest
import torch
from torch import Tensor

from kvbench.models import noise as module
from kvbench.models.noise import MIN_THREADED, PromptNoise, draw_ahead

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
        assert source.came.acquire(timeout=60)  # before it is asked for
        assert noise.draw(MIN_THREADED)[0, 0] == 1
        assert source.came.acquire(timeout=60)
        assert noise.draw(MIN_THREADED)[0, 0] == 2
    assert len(set(source.threads)) == 1
    assert threading.get_ident() not in source.threads
    assert len(source.threads) == 2


def test_few_numbers_are_not_worth_a_thread() -> None:
    source = Counting()
    with draw_ahead(source, 2, 5, 3, CPU) as noise:
        assert noise is source


def test_an_error_comes_where_the_numbers_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "pin", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory to pin")))
    with (
        draw_ahead(Counting(), 2, MIN_THREADED, 2, CPU) as noise,
        pytest.raises(RuntimeError, match="to pin"),
    ):
        noise.draw(MIN_THREADED)
