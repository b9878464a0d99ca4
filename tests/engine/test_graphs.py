"""Recordings: work captured aside and repeated, host copies made once, rows of the length that is claimed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from benchmarks.support.tape import Tape
from kvbench.core.segments import Segment
from kvbench.engine.recording.graphs import CudaGraphs, _find_stream, _hold_generator
from kvbench.engine.recording.host_copies import CapturedCopies
from kvbench.methods.h2o import H2O
from kvbench.methods.shared.hook_results import WrongTensor
from tests.support.engine import open_cache, run, small, tokens_of


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "FakeStream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams() -> Iterator[list[int]]:
    """The devices for which streams were made."""
    for once in (_find_stream, _hold_generator):
        once.cache_clear()
    yield []
    for once in (_find_stream, _hold_generator):
        once.cache_clear()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, streams: list[int]) -> list[str]:
    """What a driver that only takes notes was asked for."""
    notes: list[str] = []
    made: list[object] = []

    class FakeGraph:
        def __init__(self) -> None:
            made.append(self)
            self.number = len(made)

        def register_generator_state(self, generator: str) -> None:
            notes.append(f"{self.number} registers {generator}")

        def pool(self) -> str:
            return f"pool of {self.number}"

        def capture_begin(self, pool: str | None, mode: str) -> None:
            notes.append(f"begin {self.number} in {pool}")

        def capture_end(self) -> None:
            notes.append(f"end {self.number}")

        def replay(self) -> None:
            notes.append(f"replay {self.number}")

    @contextmanager
    def on(stream: FakeStream):
        notes.append(f"on {stream.name}")
        yield
        notes.append(f"off {stream.name}")

    def make_stream(device: int) -> FakeStream:
        streams.append(device)
        return FakeStream("side", notes)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "Stream", make_stream)
    monkeypatch.setattr(torch.cuda, "default_generators", ("generator 0", "generator 1"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: FakeStream("main", notes))
    monkeypatch.setattr(torch.cuda, "stream", on)
    return notes


def test_work_is_captured_aside_and_repeated_at_will(
    log: list[str], streams: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    CudaGraphs()  # an error of allocation inside torch's own registration would end the process
    graphs, place = CudaGraphs(), torch.zeros(1)
    out, repeat = graphs(lambda: log.append("work") or place)
    repeat()
    repeat()
    assert out is place
    assert log == [
        "1 registers generator 1",
        "side waits for main", "on side", "begin 2 in None", "work", "end 2", "off side", "main waits for side",
        "replay 2", "replay 2",
    ]  # fmt: skip
    log.clear()
    graphs(lambda: place)
    assert "begin 3 in pool of 2" in log
    assert streams == [1]  # cuBLAS keeps a workspace for every stream
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("empty"))
    graphs.make_room()
    assert log[-1] == "empty"
    graphs.clear()
    graphs(lambda: place)
    assert "begin 4 in None" in log
    assert streams == [1]


def test_a_capture_that_fails_ends(log: list[str]) -> None:
    def fail() -> torch.Tensor:
        raise ValueError("as work may")

    with pytest.raises(ValueError, match="as work may"):
        CudaGraphs()(fail)
    assert log[-1] == "end 2"


def test_the_error_of_work_survives_a_capture_that_it_broke(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> torch.Tensor:
        raise torch.OutOfMemoryError("as work may")

    def end(_: object) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", end)
    with pytest.raises(torch.OutOfMemoryError, match="as work may"):
        CudaGraphs()(fail)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_numbers_are_those_of_the_repetition() -> None:
    x = torch.ones(3, device="cuda")
    out, repeat = CudaGraphs()(lambda: x * 2)
    x.fill_(4)
    repeat()
    assert out.tolist() == [8, 8, 8]


def copy_all(number: int) -> list[Tensor]:
    place = torch.empty(2, device="meta")
    return [
        torch.tensor([number, 2]).to("meta", non_blocking=True),
        torch.tensor([3.0]).to(place),
        place.copy_(torch.tensor([4.0, 5.0])),
        torch.tensor([6]).to(torch.int32),
        place + 1,
    ]


@pytest.mark.parametrize("inference", [False, True])
def test_work_gets_the_tensors_of_the_first_time(inference: bool) -> None:
    copies = CapturedCopies()
    with torch.inference_mode(inference), copies.note():
        first = copy_all(1)
    for _ in range(2):
        with torch.inference_mode(inference), copies.reuse():
            again = copy_all(1)
        same = [one is other for one, other in zip(first, again, strict=True)]
        assert same == [
            True,
            True,
            False,
            False,
            False,
        ]  # the others are made on a device, or stay on the host
        assert [one.device.type for one in again] == ["meta", "meta", "meta", "cpu", "meta"]


@pytest.mark.parametrize("number", [7, 1])
def test_other_copies_than_before_are_an_error(number: int) -> None:
    copies = CapturedCopies()
    with copies.note():
        copy_all(1)
    with copies.reuse(), pytest.raises(RuntimeError, match="copied different values from the host"):
        [copy_all(number) for _ in range(2)]  # the second time copies more than before


@dataclass
class Claiming(H2O):
    """Keeps what fits into the budget and says another capacity."""

    said: int = 0

    def capacity(self, layer: int, segment: Segment) -> int:
        return self.said


@pytest.mark.parametrize("said", [7, 8, 9])
def test_rows_of_another_length_than_capacity_are_refused(said: int) -> None:
    """A head has 1, 5 and 14 tokens after the three cached scales, and 8 of them fit."""
    spec = small()
    cache, inputs = open_cache(Claiming(said=said), spec, "8", record=Tape()), tokens_of(spec, 2)
    if said == 8:
        run(cache, inputs)
        return
    told = f"method=Claiming: layer 0, segment 2: keep left 8 slots in row 0 and capacity says {said}; "
    with pytest.raises(WrongTensor, match=f"^{told}let capacity return None"):
        run(cache, inputs)
