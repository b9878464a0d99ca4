"""Scales that are recorded once and repeated, under every method: the draws and the ledger of launches."""

import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.support.build import built, composed
from benchmarks.support.device_watch import DeviceWatch, list_tensors
from benchmarks.support.tape import Tape
from kvbench.engine.cache import KVCache
from kvbench.engine.recording.graphs import GraphRecorder
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.view import View
from kvbench.methods.streaming_llm import StreamingLLM
from tests.support.engine import open_cache
from tests.support.methods import mark_by_kind, methods_for
from tests.support.places import ROOT
from tests.support.scale_models import SIDES, SPEC, Draw, infinity, var
from tests.support.small_models import ready


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
    assert not recorded.holds_recordings
    assert tape.cleared == 1
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


METHODS = methods_for("next-scale")
SHALLOW = ("model.pixels=0.06M", "model.transformer.depth=2", "model.transformer.block_chunks=1")


def check(draw: Draw, name: str, budget: str, *overrides: str) -> None:
    """A tape draws the same and counts the same, for one batch after another; conformance repeats twice."""
    tape, budget = Tape(), "1" if name == "full" else budget
    options = {"rotation": draw.rotation, "projection": draw.project}
    plain, recorded = (
        KVCache(SPEC, ready(name, SPEC, budget, overrides), dtype=torch.float32, record=record, **options)
        for record in (None, tape)
    )
    assert (recorded.repetitions is None) == (recorded.method.graph_obstacle is not None)
    if recorded.repetitions is None:
        return
    for number in range(2):
        found = []
        for one in (plain, recorded):
            one.prompts = [2 * number, 2 * number + 1]
            found.append(draw(one, 2, number, words=3))
            one.ledger.read_unprotected(SPEC.heads)
        assert torch.equal(*found)
        assert recorded.ledger == plain.ledger
    assert tape.recorded == tape.repeated == len(SIDES)


@pytest.fixture
def same_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a tape are padded, which changes the rounding; those of this test are equally long."""
    monkeypatch.setattr("kvbench.models.infinity.loop.PADDING_MULTIPLE", 1)


@pytest.mark.usefixtures("same_padding")
@pytest.mark.parametrize("name", METHODS)
def test_a_tape_draws_the_same_codes(name: str) -> None:
    fewer = ("method.condensed=1",) if name == "scale_groups" else ()  # which fits four scales
    check(infinity(), name, "0.6", "sinks=1", *fewer)


@pytest.mark.usefixtures("same_padding")
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("h2o", ("method.norm=per_query", "method.refresh=3")),
        ("snapkv", ("method.refresh=3", "method.ema=0.5", "method.branch_mode=mean")),
        ("cam", ("method.sample=expected",)),
        ("scalekv", ("method.released_queries=true",)),
    ],
)
def test_settings_that_change_what_is_recorded_of_var(name: str, overrides: tuple[str, ...]) -> None:
    check(var(), name, "0.6", "sinks=1", *overrides)


class Strict(DeviceWatch):
    """Refuses what a capture refuses."""

    def note_read(self, number: Tensor) -> None:
        """A number is read on the host."""
        raise AssertionError("a number is read on the host")

    def note_operation(self, func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
        """Tensors of the host that have dimensions are copied, whatever the operation."""
        tensors = [tensor for tensor in list_tensors((args, kwargs)) + results if tensor.dim()]
        assert len({tensor.device.type for tensor in tensors}) < 2, func


def obstacle(name: str) -> str | None:
    return built(composed([f"method={name}"])["method"]).graph_obstacle


@pytest.mark.parametrize("name", mark_by_kind([name for name in METHODS if obstacle(name) is None], "snapkv"))
def test_a_recording_waits_for_nothing(name: str) -> None:
    """Host reads and host copies of recorded work on a simulated GPU: there are none."""
    pytest.importorskip("triton")
    fake_gpu = importlib.import_module("benchmarks.support.fake_gpu")

    class Checked(fake_gpu.CountedReplays):
        def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
            with Strict():
                return super().__call__(work)

    budget = "1" if name == "full" else "0.3"
    words = ["model=infinity_2b", f"method={name}", f"budget={budget}", *SHALLOW]
    model, method = fake_gpu.prepare(words)
    record = Checked()
    fake_gpu.run(model, method, 2, DeviceWatch(), before=2, record=record)
    assert record.replays == len(model.spec.segments)


def test_the_page_lists_what_is_recorded() -> None:
    """Methods and reasons in docs/gpu.md are those of the classes, at the settings of conf/method."""
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    text = page.partition("| why no scale is recorded |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.+) \|$", text, re.MULTILINE)
    listed = {name: reason for names, reason in rows for name in re.findall(r"\w+", names)}
    found = {name: obstacle(name) for name in (*METHODS, "kvpress")}
    assert listed == {name: reason for name, reason in found.items() if reason is not None}
