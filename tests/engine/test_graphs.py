"""Recordings: work captured aside and repeated, host copies made once, rows of the length that is claimed."""

from collections.abc import Iterator
from dataclasses import dataclass
from unittest.mock import MagicMock

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


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[MagicMock]:
    """A driver that records its calls and replaces functions of torch."""
    driver = MagicMock(default_generators=("generator 0", "generator 1"))
    driver.current_device.return_value = 1
    driver.CUDAGraph.side_effect = (getattr(driver, f"graph{number}") for number in range(9))
    names = "CUDAGraph Stream stream current_device current_stream default_generators empty_cache"
    for name in names.split():
        monkeypatch.setattr(torch.cuda, name, getattr(driver, name))
    for once in (_find_stream, _hold_generator):
        once.cache_clear()
    yield driver
    for once in (_find_stream, _hold_generator):
        once.cache_clear()


def test_work_is_captured_aside_and_repeated_at_will(driver: MagicMock) -> None:
    CudaGraphs()  # an error of allocation inside torch's own registration would end the process
    graphs = CudaGraphs()
    out, repeat = graphs(driver.work)
    repeat()
    repeat()
    assert out is driver.work.return_value
    assert [name for name, *_ in driver.mock_calls if "." in name or name == "work"] == [
        "graph0.register_generator_state",
        "Stream().wait_stream", "stream().__enter__", "graph1.capture_begin", "work", "graph1.capture_end",
        "stream().__exit__", "current_stream().wait_stream",
        "graph1.replay", "graph1.replay",
    ]  # fmt: skip
    driver.graph0.register_generator_state.assert_called_once_with("generator 1")
    driver.graph1.capture_begin.assert_called_once_with(None, "thread_local")
    driver.stream.assert_called_once_with(driver.Stream.return_value)
    graphs(driver.work)
    driver.graph2.capture_begin.assert_called_once_with(driver.graph1.pool(), "thread_local")
    graphs.make_room()
    driver.empty_cache.assert_called_once()
    graphs.clear()
    graphs(driver.work)
    driver.graph3.capture_begin.assert_called_once_with(None, "thread_local")
    driver.Stream.assert_called_once_with(1)  # cuBLAS keeps a workspace for every stream


@pytest.mark.parametrize("broken", [None, RuntimeError("operation failed due to a previous error")])
def test_a_capture_that_fails_ends_and_its_error_survives(
    driver: MagicMock, broken: Exception | None
) -> None:
    driver.graph1.capture_end.side_effect = broken
    with pytest.raises(torch.OutOfMemoryError, match="as work may"):
        CudaGraphs()(MagicMock(side_effect=torch.OutOfMemoryError("as work may")))
    driver.graph1.capture_end.assert_called_once()


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
        # The others are made on a device, or stay on the host.
        assert same == [True, True, False, False, False]
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
