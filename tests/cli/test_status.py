"""Status of a sweep: what its runs and workers do, how fast and for how long."""

import json
import os
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kvbench.cli.sweeps.jobs import claim_of, find_named, name_sweep, open_folder, write_entry
from kvbench.cli.sweeps.outcomes import list_failures
from kvbench.cli.workers.control import control
from kvbench.cli.workers.log import Block, read_logs, writing_log
from kvbench.cli.workers.status import show_all, show_status
from kvbench.core.claims import claim
from kvbench.core.config import ConfigError
from kvbench.runs.record.sweeps import JobStatus, read_entries

JOBS = [
    (f"method={name}", "budget=0.2", "prompts.count=8") for name in ("full", "swa", "random", "h2o", "rkv")
]
LONG = "RuntimeError: " + "a reason that is longer than a line of the terminal has room for " * 3


def write_log(folder: Path, name: str, paces: list[tuple[str, float]], device: str = "cuda:0") -> None:
    """Write the log of a worker that made one sample a block and ended after an hour."""
    lines = [{"host": name, "device": device, "at": 0.0}]
    lines += [{"run": run, "samples": 1, "seconds": seconds, "at": 1.0} for run, seconds in paces]
    (folder / "workers").mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in [*lines, {"at": 3600.0}])
    (folder / "workers" / f"{name}.jsonl").write_text(text)


def render(folder: Path) -> list[str]:
    console = Console(width=100, record=True, file=StringIO())
    show_status(console, folder, verbose=False)
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_a_log_says_what_its_worker_did(tmp_path: Path) -> None:
    with writing_log(tmp_path, "cpu", 60.0) as log:
        log.write(vars(Block("swa-1", 4, 2.0)))
        log.write(vars(Block("swa-1", 4, 6.0)))
        [running] = read_logs(tmp_path)
    [ended] = read_logs(tmp_path)
    assert (running.alive, ended.alive) == (True, False)
    assert ended.blocks == (Block("swa-1", 4, 2.0), Block("swa-1", 4, 6.0))
    assert (ended.samples, ended.rate, ended.device) == (8, 1.0, "cpu")
    killed = tmp_path / "workers/.killed-1-abcd"
    killed.write_text('{"machine": "another", "lapse": 0.001}')
    os.utime(killed, (1, 1))
    with writing_log(tmp_path, "cpu", 60.0), writing_log(tmp_path, "cpu", 60.0):
        pass  # the inner one ends while the other runs
    assert not list((tmp_path / "workers").glob(".*"))
    [path] = [path for path in (tmp_path / "workers").iterdir() if "swa-1" in path.read_text()]
    path.write_text(path.read_text() + '{"run": "torn')
    assert ended.blocks in [log.blocks for log in read_logs(tmp_path)]


def test_status_is_readable_at_a_hundred_columns(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, JOBS)
    run = tmp_path / "model/swa-0.2-ab"
    (run / "images").mkdir(parents=True)
    (run / "samples.jsonl").write_text("{}\n" * 3)
    now = folder.stat().st_mtime
    for index, age in enumerate((20, 10, 0)):
        (run / f"images/{index}.png").touch()
        os.utime(run / f"images/{index}.png", (now - age, now - age))
    write_entry(folder, JobStatus(0, JOBS[0], "finished", folder="model/full-cd", host="node1"))
    write_entry(folder, JobStatus(1, JOBS[1], "started", samples={str(run): 8}, host="node2"))
    write_entry(folder, JobStatus(2, JOBS[2], "failed", error=LONG, host="node3"))
    control(folder, "drop", 3)
    control(folder, "pause")
    write_log(folder, "node1", [("full-cd", 1.0), ("swa", 1.0), ("swa", 1.0), ("swa", 1.0)])
    write_log(folder, "node2", [("swa", 30.0)])
    write_log(folder, "node3", [], device="cpu")
    with claim(claim_of(folder, 1)):
        lines = render(folder)
        failures = list_failures(folder, read_entries(folder))
    assert [name for name, _ in failures] == ["running swa", "failed random", "missing rkv"]
    [(name, remedy), *_] = list_failures(folder, read_entries(folder))
    assert name == "interrupted swa"
    assert remedy.endswith("; run the same command again to resume it")
    assert max(map(len, lines[4:])) <= 100  # the first name the folder, which may be anywhere
    assert lines[2].startswith("jobs: 1 done, 1 running, 1 failed, 1 missing, 1 dropped; samples: 3 of ")
    assert lines[3] == "paused: work.do=resume lets workers go on"
    [_, first, second, *_] = lines[4:]
    number, state, samples, rate, left, *words = first.split()
    assert (number, state, samples, words) == ("1", "running", "3/8", ["method=swa", "on", "node2"])
    assert float(rate) == pytest.approx(0.1, rel=0.2)  # two in the last 20 s, and clocks go on
    assert left.startswith("0:00:5")
    assert second.split()[:2] == ["2", "failed"]
    assert "workers: 0 working, 3 ended; used: 2.00 GPU-hours, 1.00 CPU worker-hours" in lines


def test_all_sweeps_and_running_runs_are_listed(tmp_path: Path) -> None:
    first, second = open_folder(tmp_path, JOBS), open_folder(tmp_path, JOBS[:2])
    name_sweep(first, "main")
    os.utime(second / "sweep.json", (1, 1))
    write_entry(first, JobStatus(0, JOBS[0], "finished", "model/full-1", samples={"model/full-1": 8}))
    write_entry(first, JobStatus(1, JOBS[1], "failed", error="no memory"))
    run = tmp_path / "model" / "swa-0.2-ab"
    console = Console(width=250, record=True, file=StringIO())
    (tmp_path / "model/rkv-0.2-cd/.lock").mkdir(parents=True)
    with claim(run / ".block-0-8"), claim(claim_of(first, 2)):
        show_all(console, tmp_path)
    head, *rows = [line.split() for line in console.export_text().splitlines()]  # the folder says nothing
    assert head[:5] == ["sweep", "done", "running", "failed", "missing"]
    assert rows[0][:5] == ["main", "1", "1", "1", "2"]
    assert rows[1][:5] == [second.name[:8], "0", "0", "0", "2"]
    assert " ".join(rows[3]) == f"{second}: full ... swa"
    assert rows[4:] == [["runs", "in", "progress:", "1"], [str(run)]]


def test_a_name_finds_the_sweep_that_got_it_last(tmp_path: Path) -> None:
    first, second = open_folder(tmp_path, JOBS), open_folder(tmp_path, JOBS[:2])
    name_sweep(first, "main")
    os.utime(first / "name.txt", (1, 1))
    name_sweep(second, "main")
    name_sweep(second, None)
    assert find_named(tmp_path, "main") == second
    with pytest.raises(ConfigError, match=r"sweep\.name=other: no sweep .* has this name; choose from main"):
        find_named(tmp_path, "other")
