"""Costs of a run, against numbers worked out by hand."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_scale
from kvbench.engine.ledger import Step
from kvbench.methods.shared.view import View
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.report.means import average_latency
from kvbench.runs import execute
from kvbench.runs.record import machine
from kvbench.runs.record.costs import Cost, average_steps, summarise_latency, summarise_memory
from kvbench.runs.record.results import Latency, Memory
from tests.support.fake_run import job_in

# 3 layers of 4 heads hold 1 + 4 tokens before the last scale; keys and values have 64 channels; two branches.
SPEC = ModelSpec("small", 3, 4, 64, next_scale([(1, 1), (2, 2), (3, 3)]), branches=2)
COST = Cost(
    batch=2, seconds=1.0, peak_tokens=48, peak_bytes=5, rebuild_bytes=6, transient_bytes=7, state_bytes=8,
    gpu_peak_bytes=9, last_tokens=30, least_share=0.5, lse_drift=-0.25, longest=5, sequence_bytes=10, last_bytes=4,
    device="cpu", machine="A", load=0.5,
)  # fmt: skip


@dataclass
class Positive(StreamingLLM):
    """Keeps the latest tokens with a positive first key channel, so that sequences differ in length."""

    static: ClassVar[bool] = False

    def keep(self, view: View) -> Tensor:
        return super().keep(view) & ((view.cached_keys()[..., 0] > 0) | (view.position < 1))


def test_a_sample_costs_the_same_beside_others(tmp_path: Path) -> None:
    """What it held and read is of its own two sequences, conditional and unconditional."""
    found = []
    for size in (3, 1):
        job = job_in(tmp_path / str(size), 6, Positive(sinks=1), batch_size=size, evaluators={})
        lines = (execute.run(job).folder / "samples.jsonl").read_text().splitlines()
        names = ("least_share", "last_tokens", "last_bytes", "bytes_read", "longest")
        found.append([[record[name] for name in names] for record in map(json.loads, lines)])
    assert found[0] == found[1]
    assert len({cost[0] for cost in found[0]}) > 2


def test_memory_is_the_worst_of_all_batches() -> None:
    second = {"peak_tokens": 50, "peak_bytes": 4, "state_bytes": 80, "last_bytes": 3, "longest": 7}
    third = {"batch": 8, "rebuild_bytes": 60, "transient_bytes": 70, "gpu_peak_bytes": 90, "lse_drift": -1.5}
    costs = [
        COST,
        replace(COST, last_tokens=20, least_share=0.75, **second),
        replace(COST, gpu_reserved_bytes=95, **third),
    ]
    memory = summarise_memory(costs, SPEC, Budget.parse("0.8", SPEC), itemsize=2)
    assert (memory.budget_tokens, memory.full_tokens, memory.peak_tokens) == (48, 60, 50)
    assert memory.full_bytes == 60 * 128 * 2 * 2 * 8
    assert (memory.peak_bytes, memory.rebuild_bytes, memory.transient_bytes) == (5, 60, 70)
    assert (memory.state_bytes, memory.gpu_peak_bytes, memory.batch) == (80, 90, 8)
    assert memory.gpu_reserved_bytes == 95
    assert (memory.sequence_bytes, memory.last_bytes, memory.full_sequence_bytes) == (10, 3, 60 * 128 * 2)
    assert (memory.last_tokens, memory.least_share, memory.lse_drift) == (20, 0.5, -1.5)
    assert (memory.regular_tokens, memory.utilisation) == (7 * 12, None)
    assert memory.paper_full_mib == 60 * 64 * 6 * 2 * 8 / 2**20
    assert memory.paper_peak_mib == 50 * 64 * 6 * 2 * 8 / 2**20


def test_means_are_of_the_samples_that_have_a_value() -> None:
    def summarise(*changes: dict[str, Any]) -> Memory:
        costs = [replace(COST, **change) for change in changes]
        return summarise_memory(costs, SPEC, Budget.parse("0.8", SPEC), itemsize=2)

    memory = summarise({"utilisation": 0.5}, {}, {"utilisation": 0.75, "longest": None})
    assert (memory.utilisation, memory.regular_tokens) == (0.625, None)
    assert summarise({"bytes_read": 30}, {"bytes_read": 10}).bytes_read == 20  # of an image
    text = {"bytes_read": 30, "tokens": 5}
    assert summarise(text, {"bytes_read": 10, "tokens": 3}).bytes_read == 5  # of a token
    assert summarise(text, {"tokens": 3}).bytes_read is None
    known, unknown = Step(4, 4, 4, lse=1.0, kept_lse=0.5), Step(4, 2, 3)
    assert average_steps([[known], [known]]) == (replace(known, n=2),)
    assert average_steps([[known], [unknown]]) == (Step(4, 3, 3.5, n=2),)


@pytest.mark.parametrize(
    "other",
    [
        {"batch": 4, "device": "cuda:1", "machine": "GPU"},
        {"batch": 8, "device": "cpu", "machine": "B"},
        {"batch": 8, "device": "cpu", "machine": "A", "load": 1.25},
        {"batch": 16, "device": "cpu", "machine": "A", "load": 1.2},
    ],
)
def test_times_of_other_conditions_are_left_out(other: dict[str, Any]) -> None:
    usual = replace(COST, batch=8, seconds=2.0, tokens=10)
    slow = replace(usual, seconds=100.0, tokens=7, **other)
    latency = summarise_latency([slow, usual, replace(usual, seconds=4.0), slow, replace(usual, load=1.1)])
    assert latency.seconds_per_image == pytest.approx((2 + 4 + 2) / 3)
    assert latency.seconds_per_image_median == 2
    assert latency.images_per_second == pytest.approx(3 / 8)
    assert latency.tokens_per_second == pytest.approx(30 / 8)
    assert (latency.batch, latency.device, latency.machine, latency.busy) == (8, "cpu", "A", False)
    assert (latency.samples, latency.others, latency.mark) == (3, 2, "~")
    most = summarise_latency([slow, slow, usual])
    assert (most.seconds_per_image, most.samples, most.others) == (100, 2, 1)


def test_a_load_is_what_the_process_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "WAITED", tmp_path / "schedstat")
    monkeypatch.setattr("os.getloadavg", lambda: (6.0, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert (machine.read_waited(), machine.find_load(None, 2.0)) == (None, 1.5)
    (tmp_path / "schedstat").write_text("700 3000000000 12\n")
    assert machine.read_waited() == 3
    assert [machine.find_load(3.0 - waited, 2.0) for waited in (0.0, 1.0, 3.0)] == [1, 2, 100]


def test_times_of_several_seeds_are_of_one_condition() -> None:
    usual = Latency(1.0, 1.0, 1.0, 8, "cpu", samples=10, machine="A")
    elsewhere = replace(usual, seconds_per_image=9.0, machine="B")
    latency = average_latency([usual, elsewhere, replace(usual, seconds_per_image=2.0, others=3)])
    assert (latency.seconds_per_image, latency.samples, latency.others) == (1.5, 20, 13)
