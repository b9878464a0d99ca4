"""CUDA graphs are captured on a stream of their own, in one pool; on a GPU they repeat what was recorded."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvbench.engine.recording.graphs import CudaGraphs, _find_stream, _hold_generator


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
