"""Two processes that share a language model write what one writes, keep as much, and resume when one is killed."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.cli.dispatch import run_alone
from kvbench.core.budget import Budget
from kvbench.core.config import ConfigError
from kvbench.core.processes import ALONE, Processes
from kvbench.core.segments import ModelSpec, next_token
from kvbench.engine.ledger import Ledger, add_ledgers
from kvbench.methods.headkv import HeadKV
from kvbench.methods.heatkv.method import HeatKV
from kvbench.methods.shared.capacities import share_evenly
from kvbench.runs.check import check_job
from tests.support.command_line import RUN, find_port, start_two
from tests.support.fake_run import count_records, job_in
from tests.support.parallel import CASES, SAMPLED, collect, make_model
from tests.support.places import ROOT
from tests.support.small_models import SMALL_QWEN3

KEYS = [*(f"{case} at 0.0" for case in CASES), *(f"{case} at 1.0" for case in SAMPLED)]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    folder = tmp_path_factory.mktemp("together")
    both = start_two(folder, str(ROOT / "tests/support/parallel.py"), "found.json")
    told = [process.communicate(timeout=600)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def alone() -> Mapping[str, Any]:
    return json.loads(json.dumps(collect(ALONE)))


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_two_processes_write_as_one(together: Mapping[str, Any], alone: Mapping[str, Any], key: str) -> None:
    ours, theirs = together[key], alone[key]
    assert ours["equal"], "logits and texts are the same bits in both processes"
    assert ours["texts"] == theirs["texts"]
    assert ours["tokens"] == theirs["tokens"]
    torch.testing.assert_close(torch.tensor(ours["last"]), torch.tensor(theirs["last"]), rtol=1e-4, atol=1e-4)
    if "top_p" not in key and "rkv" not in key:  # whose heads do not all peak at once
        assert ours["bytes"] == theirs["bytes"]
    assert all(mine >= others for mine, others in zip(ours["bytes"], theirs["bytes"], strict=True))
    assert key == KEYS[0] or theirs["texts"] != alone["full at 0.0"]["texts"]


def test_tokens_of_several_ledgers_are_those_of_each_sequence() -> None:
    """The most of a sum is less than the sum of the mosts where sequences are long in different heads."""
    both = [Ledger([[[3, 7]], [[2, 0]]], peak_bytes=5), Ledger([[[6, 1]], [[0, 4]]], peak_bytes=2)]
    found = add_ledgers(both)
    assert (found.tokens_after, found.peak_tokens, found.peak_bytes) == ([[9], [4]], 9, 7)


@given(
    layers=st.integers(1, 4), heads=st.integers(1, 4), count=st.integers(1, 4), capacity=st.fractions(0.05, 1)
)
def test_a_head_has_the_same_room_in_its_share(layers: int, heads: int, count: int, capacity: Any) -> None:
    spec = ModelSpec("small", layers, heads * count, 8, next_token(5, [4, 4]), 1)
    budget = Budget(capacity * spec.full_tokens, spec.full_tokens, spec.all_heads)

    def rooms(of: ModelSpec, tokens: int) -> list[list[int]]:
        return [[room] * of.heads if isinstance(room, int) else [*room] for room in share_evenly(tokens, of)]

    shares = [spec.take_share(rank, count) for rank in range(count)]
    found = [rooms(share, budget.take_share(spec, share).tokens) for share in shares]
    joined = [[room for one in found for room in one[layer]] for layer in range(layers)]
    assert joined == rooms(spec, budget.tokens)


JOB = (
    *SMALL_QWEN3, "model.max_tokens=34", "model.stop=false", "method=streaming_llm", "budget=16", "prompts=file",
    "prompts.path=questions.txt", "eval=none", "batch_size=2",
)  # fmt: skip
SPLIT = (*JOB, "model.tensor_parallel=2")


def texts_in(runs: Path) -> dict[str, bytes]:
    return {str(path.relative_to(runs)): path.read_bytes() for path in runs.rglob("*.txt")}


@pytest.mark.slow
def test_two_processes_resume_to_the_run_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("questions.txt").write_text("".join(f"what is {number} plus one\n" for number in range(6)))
    both = start_two(tmp_path, RUN, *SPLIT)
    deadline = time.monotonic() + 600
    while count_records(tmp_path / "runs") < 2 and time.monotonic() < deadline and both[0].poll() is None:
        time.sleep(0.02)
    both[1].send_signal(signal.SIGKILL)
    told, _ = both[0].communicate(timeout=600)
    both[1].communicate()
    assert both[0].returncode == 1
    assert "error: process 0 of 2: another process ended or does not answer" in told
    assert "Traceback" not in told
    made = texts_in(tmp_path / "runs")
    assert 2 <= len(made) < 12

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    port = ["--master-addr=127.0.0.1", f"--master-port={find_port()}"]
    program = [*torchrun, *port, RUN, *SPLIT]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished: runs/qwen3_8b/streaming_llm-") == 1
    ours = texts_in(tmp_path / "runs")
    assert made.items() <= ours.items()

    run_alone([*JOB, "runs_dir=alone"])
    assert texts_in(tmp_path / "alone") == ours
    [mine], [theirs] = ((tmp_path / root).rglob("streaming_llm-*/results.json") for root in ("runs", "alone"))
    memories = [json.loads(path.read_text())["memory"] for path in (mine, theirs)]
    assert memories[0] == memories[1]
    told = [
        [path.read_bytes() for path in (tmp_path / root).rglob("retention.json")]
        for root in ("runs", "alone")
    ]
    assert sorted(told[0]) == sorted(told[1])
    [records] = (tmp_path / "runs").rglob("streaming_llm-*/samples.jsonl")
    assert {json.loads(line)["processes"] for line in records.read_text().splitlines()} == {2}


@pytest.mark.parametrize(
    ("started", "given", "told"),
    [
        (1, SPLIT, "=2: started as 1 process; start it as `torchrun --nproc-per-node 2 "),
        (2, JOB, "=1: started as 2 processes; start it as `python run.py"),
        (2, (*SPLIT, "task=plan"), "=2: task=plan is for one process"),
        (3, (*JOB, "model.tensor_parallel=3"), "=3: must divide model.transformer.heads=4"),
        (2, (*SPLIT, "device=cuda:1"), " needs its own GPU"),
    ],
)
def test_what_cannot_be_split_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: int, given: tuple[str, ...], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", str(started))
    Path("questions.txt").write_text("why\n")
    with pytest.raises(ConfigError, match=f"model.tensor_parallel{told}"):
        run_alone(list(given))
    assert not (tmp_path / "runs").exists()


def test_methods_that_compare_all_heads_want_one_process(tmp_path: Path) -> None:
    methods = (HeadKV(sinks=1), HeatKV(sinks=1), HeadKV(sinks=1, match_mean=False))
    jobs = [job_in(tmp_path, model=make_model(ALONE, 0), method=method, budget=20) for method in methods]
    for job in jobs:
        job.model.processes = Processes(1, 2)
    *refused, job = jobs
    for one in refused:
        with pytest.raises(ConfigError, match=r"model.tensor_parallel=2: method=\w+ compares all heads"):
            check_job(one)
    check_job(job)
    assert (job.cache_plan.spec.heads, job.cache_plan.spec.first_head) == (2, 2)
    assert job.budget.take_share(job.model.spec, job.cache_plan.spec).capacity * 2 == job.budget.capacity
