"""Scales that are recorded once and repeated: the same codes as one by one, and the same ledger."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.support.tape import Tape
from kvbench.core.segments import Segment
from kvbench.engine.cache import KVCache
from kvbench.engine.recording.graphs import GraphRecorder
from kvbench.engine.recording.repetitions import Repetitions
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.hook_results import WrongTensor
from kvbench.methods.shared.view import View
from kvbench.methods.streaming_llm import StreamingLLM
from tests.support.engine import open_cache
from tests.support.scale_models import SIDES, SPEC, Draw, infinity, var


def cache_of(method: Method, record: GraphRecorder | None = None) -> KVCache:
    return open_cache(method, SPEC, 1 if isinstance(method, Full) else 0.6, record=record)


@pytest.mark.parametrize("model", [infinity, var])
def test_other_batches_have_records_of_their_own(model: Callable[[], Draw]) -> None:
    draw, tape = model(), Tape()
    plain, recorded = cache_of(StreamingLLM(sinks=1)), cache_of(StreamingLLM(sinks=1), tape)
    for prompts in (1, 1, 2, 2, 1, 1, 2, 1):  # two prompts need another arena, which moves what is stored
        torch.testing.assert_close(draw(recorded, prompts, 7 + prompts), draw(plain, prompts, 7 + prompts))
        assert recorded.ledger == plain.ledger
    assert tape.recorded == 3 * len(SIDES)


@pytest.mark.slow
def test_memory_that_ran_out_is_given_back() -> None:
    """What was recorded holds its tensors; after an error nothing of a generation is left, and the next is right."""
    draw, tape = infinity(), Tape()
    plain, recorded = cache_of(StreamingLLM(sinks=1)), cache_of(StreamingLLM(sinks=1), tape)
    for _ in range(2):
        draw(recorded, 2, 7)
    gc.collect()
    before = count_tensors()
    recorded.forget()
    gc.collect()
    assert count_tensors() <= before - 2 * len(SIDES)
    assert tape.cleared == 1
    torch.testing.assert_close(draw(recorded, 2, 7), draw(plain, 2, 7))
    assert recorded.ledger == plain.ledger


def count_tensors() -> int:
    return sum(isinstance(one, Tensor) for one in gc.get_objects())


class Greedy(H2O):
    """Says that it keeps fewer slots than it does."""

    def capacity(self, layer: int, segment: Segment) -> int:
        return 1


def test_lengths_that_differ_from_capacity_are_refused_before_a_recording() -> None:
    tape = Tape()
    with pytest.raises(WrongTensor, match=r"^method=Greedy: layer 0, segment 1: keep left \d slots in row 0"):
        infinity()(cache_of(Greedy(), tape), 1, 7)
    assert not tape.recorded


class Protecting(H2O):
    """Protects slots by their values: how many of them are dropped depends on data."""

    def score(self, view: View) -> Tensor:
        return view.state.masked_fill(view.cached_values()[..., 0] > 0, torch.inf)


def test_numbers_of_the_ledger_that_depend_on_data_are_not_frozen() -> None:
    draw, found = infinity(), []
    plain, recorded = (open_cache(Protecting(), SPEC, 0.2, record=record) for record in (None, Tape()))
    for seed in range(5):
        for cache in (plain, recorded):
            draw(cache, 2, seed)
            cache.ledger.read_unprotected(SPEC.heads)
        assert recorded.ledger == plain.ledger
        found.append(tuple(recorded.ledger.unprotected))
    assert len(set(found[2:])) == 3  # of the repetitions


@pytest.mark.parametrize("model", [infinity, var])
def test_recordings_do_not_need_the_memory_of_launches_too(
    model: Callable[[], Draw], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One generation reserves memory, the next one returns it before it is recorded, later ones need none."""
    done: list[str] = []

    class Noting(Tape):
        def make_room(self) -> None:
            done.append("room")

        def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
            done.append("record")
            return super().__call__(work)

    for kind in ("infinity", "var"):
        monkeypatch.setattr(f"kvbench.models.{kind}.loop.reserve", lambda *_: done.append("reserve"))
    cache = cache_of(StreamingLLM(sinks=1), Noting())
    for _ in range(3):
        model()(cache, 2, 7)
        done.append("end")
    assert done == ["reserve", "end", "room", *["record"] * len(SIDES), "end", "end"]


class Crowded(Tape):
    """Memory suffices for `room` recordings."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        if self.recorded == self.room:
            raise torch.OutOfMemoryError
        return super().__call__(work)


def test_a_recording_that_does_not_fit_is_not_tried_again() -> None:
    draw, tape = infinity(), Crowded(2)
    plain, recorded = cache_of(H2O()), cache_of(H2O(), tape)
    draw(recorded, 2, 7)
    assert not recorded.holds_recordings
    with pytest.raises(torch.OutOfMemoryError):
        draw(recorded, 2, 8)
    assert recorded.holds_recordings
    recorded.forget()
    tape.room = 100
    for seed in (8, 9, 10):
        torch.testing.assert_close(draw(recorded, 2, seed), draw(plain, 2, seed))
        assert recorded.ledger == plain.ledger
    assert tape.recorded == 2


def test_after_memory_ran_out_one_batch_size_is_recorded_at_a_time() -> None:
    draw, tape = infinity(), Tape()
    recorded = cache_of(StreamingLLM(sinks=1), tape)
    for prompts in (2, 2, 1):
        draw(recorded, prompts, 7)
    recorded.forget()  # as if the launches of one prompt had not fit beside recordings of two
    cleared = tape.cleared
    for prompts in (2, 2, 2):
        draw(recorded, prompts, 7)
    assert tape.cleared == cleared
    draw(recorded, 1, 7)
    assert tape.cleared == cleared + 1
    assert tape.recorded == 2 * len(SIDES)


def test_what_is_held_stays_where_it_is() -> None:
    again = Repetitions(Tape(), lambda: lambda: None)
    first = (torch.tensor([1.0]), (torch.tensor([2]), None))
    assert again.hold(first) is first
    assert again.by_launches
    place = first[0].data_ptr()
    held = again.hold((torch.tensor([3.0]), (torch.tensor([4]), None)))
    assert held is first
    assert not again.by_launches
    assert held[0].data_ptr() == place
    assert (held[0].item(), held[1][0].item()) == (3, 4)
    other = (torch.tensor([1.0, 5.0]), (torch.tensor([2]), None))
    assert again.hold(other) is other
