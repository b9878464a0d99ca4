"""Simulated workers against closed forms, and their costs against what the system was asked for."""

import math
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.__main__ import main
from benchmarks.claims import count_for_a_piece
from benchmarks.support.file_calls import REMEDY, can_count, count_calls, read_trace
from benchmarks.support.simulated_sweep import FileServer, Outcome, Simulation, Sweep
from benchmarks.support.worker_costs import Costs, solve_costs, trace_steps
from benchmarks.workers import COSTS
from kvbench.cli.workers.work import LONGEST

NOTHING = Costs(**dict.fromkeys(COSTS.__dataclass_fields__, 0.0))
needs_strace = pytest.mark.skipif(not can_count(), reason=REMEDY)


def simulate(sweep: Sweep, workers: int, costs: Costs = NOTHING, server: FileServer | None = None) -> Outcome:
    return Simulation(sweep, costs, workers, server or FileServer()).run()


def test_one_worker_takes_the_sum_of_all() -> None:
    sweep = Sweep(jobs=7, blocks=5, block_seconds=20, score_seconds=3, load_seconds=60)
    found = simulate(sweep, 1)
    assert found.seconds == pytest.approx(60 + 8 * (5 * 20 + 3))
    assert found.efficiency == pytest.approx(8 * 5 * 20 / found.seconds)
    assert sum(found.shares.values()) == pytest.approx(1)


def test_calls_of_one_worker_add_up() -> None:
    server = FileServer(rate=1000, latency=0.002)
    sweep = Sweep(jobs=1, blocks=4, block_seconds=20)
    costs = Costs(
        look=1, refused=2, attempt=100, attempt_seconds=0, first=30, known=5, read=7, block=50, busy=11
    )
    found = simulate(sweep, 1, costs, server)
    # Two runs, each listed after its last block; the job is looked at before and after.
    assert server.served.total() == pytest.approx(100 + 2 * (4 * 50 + 30 + 4 * 5) + 2 * 1)
    assert found.seconds == pytest.approx(8 * 20 + 0.002 * (100 + 2 * (30 + 4 * 5 + 50) + 2))


@given(
    workers=st.integers(1, 16),
    jobs=st.integers(1, 6),
    blocks=st.integers(1, 8),
    spread=st.floats(0, 1),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=15)
def test_without_costs_no_worker_rests_while_there_is_work(
    workers: int, jobs: int, blocks: int, spread: float, seed: int
) -> None:
    """Graham's bound for list scheduling; scores wait for the reference's, and so for a look."""
    sweep = Sweep(jobs, blocks, block_seconds=50, spread=spread, seed=seed)
    simulation = Simulation(sweep, NOTHING, workers, FileServer())
    every = [seconds for run in (simulation.reference, *simulation.runs) for seconds in run.seconds]
    found = simulation.run()
    mean, longest = sum(every) / workers, max(every)
    assert max(mean, longest) - 1e-6 <= found.seconds
    assert found.seconds <= mean + (1 - 1 / workers) * longest + 2 * LONGEST
    assert all(run.whole and run.scored for run in (simulation.reference, *simulation.runs))


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_waiting_at_the_file_server_is_that_of_one_queue(load: float) -> None:
    """Pollaczek and Khinchin: calls that come at random wait load / (2 rate (1 - load)) on average."""
    server, draw, now, waited, count = FileServer(rate=100), random.Random(0), 0.0, 0.0, 60_000
    for _ in range(count):
        now += draw.expovariate(100 * load)
        waited += server.serve(now, 1) - now - 1 / 100
    assert waited / count == pytest.approx(load / (2 * 100 * (1 - load)), rel=0.05)
    assert max(server.served.values()) <= 100 + 1e-6


def test_a_herd_is_served_at_the_server_s_rate() -> None:
    sweep = Sweep(jobs=20, blocks=20, block_seconds=1)
    server = FileServer(rate=1000)
    found = simulate(sweep, 400, COSTS, server)
    assert found.peak == pytest.approx(1000)
    assert found.seconds >= server.served.total() / 1000 * (1 - 1e-9)
    late = simulate(Sweep(jobs=20, blocks=20, block_seconds=1, jitter=600), 400, COSTS, FileServer(rate=1000))
    assert late.shares["files"] < found.shares["files"]


def test_the_same_seed_gives_the_same_sweep() -> None:
    sweep = Sweep(jobs=5, blocks=5, block_seconds=2, spread=0.3, jitter=4, seed=1)
    first, second = (simulate(sweep, 9, COSTS, FileServer(500, 1e-4)) for _ in range(2))
    assert first == second
    assert simulate(Sweep(5, 5, 2, 0.3, jitter=4, seed=2), 9, COSTS, FileServer(500, 1e-4)) != first


def test_a_row_is_printed_for_each_server_and_number(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workers", "1", "4", "--rate", "100", "1000", "--jobs", "3", "--blocks", "4"]
    assert main(["workers", *words]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row[:20].strip() for row in rows] == ["1, 100/s", "4, 100/s", "1, 1000/s", "4, 1000/s"]
    assert all(0 < float(row.split()[3]) <= 1 for row in rows)
    assert math.isclose(sum(float(cell.rstrip("%")) for cell in rows[0].split()[5:]), 100, abs_tol=0.5)


def test_calls_are_counted_in_their_sections() -> None:
    trace = """
1 openat(AT_FDCWD</home>, "/folder/.claim", O_CREAT) = 3</folder/.claim>
1 newfstatat(AT_FDCWD</home>, "/section-of-the-trace/one", 0, 0) = -1 ENOENT
12 openat(AT_FDCWD</home>, "/folder/.claim", O_CREAT <unfinished ...>
1 write(3</folder/.claim>, ""..., 5) = 5
12 <... openat resumed>) = 4</folder/.claim>
1 lseek(3</folder/.claim>, 0, SEEK_CUR) = 0
1 openat(AT_FDCWD</home>, "/elsewhere", O_RDONLY) = 5</elsewhere>
"""
    assert read_trace(trace, "/folder") == {"": {"openat": 1}, "one": {"openat": 1, "write": 1}}


@needs_strace
def test_strace_counts_the_calls_of_a_program(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    program = f"""
from pathlib import Path
from benchmarks.support.file_calls import begin_section
begin_section("writing")
for number in range(5): Path({str(folder)!r}, str(number)).write_bytes(b"x")
begin_section("removing")
for number in range(3): Path({str(folder)!r}, str(number)).unlink()
"""
    found = count_calls([sys.executable, "-c", program], folder, tmp_path / "trace")
    assert found["writing"]["openat"] == found["writing"]["write"] == found["writing"]["close"] == 5
    assert found["removing"] == {"unlink": 3}


@needs_strace
def test_a_claimed_piece_makes_one_file_and_removes_it(tmp_path: Path) -> None:
    calls = count_for_a_piece(str(tmp_path), work=10)
    assert (calls["flock"], calls["unlink"], calls["write"]) == (1, 1, 1)
    assert calls["openat"] == 2  # the claim and the mark


@needs_strace
@pytest.mark.slow
def test_costs_of_the_real_worker_are_those_that_are_simulated() -> None:
    calls = trace_steps(batch=1)
    found = solve_costs(calls, dict.fromkeys(calls, 0.0))
    assert (found.look, found.refused, found.busy) == (COSTS.look, COSTS.refused, COSTS.busy)
    assert (found.known, found.read) == (COSTS.known / 8, COSTS.read / 8)
    assert found.attempt == pytest.approx(COSTS.attempt, rel=0.1)
    assert COSTS.block / 8 < found.block < COSTS.block
