"""Damaged runs and sweeps of every kind, and runs that lost records: named by every reader, and the rest is shown."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from kvbench.cli.api import Run
from kvbench.cli.sweeps.jobs import write_entry
from kvbench.cli.workers.status import show_all, show_status
from kvbench.core.config import ConfigError
from kvbench.dashboard.datasets import read_dataset
from kvbench.dashboard.document import make_document
from kvbench.data.frames import export_frames
from kvbench.data.publication import write_file_list
from kvbench.extras.share.publish.dataset import prepare_dataset, read_published
from kvbench.report.collect import collect_runs, read_with_references
from kvbench.report.document import make_tail, write_report
from kvbench.report.one_run import show_run
from kvbench.report.runs_table import show_runs
from kvbench.report.seeds import combine_seeds
from kvbench.runs import execute
from kvbench.runs.record.merge import merge_runs
from kvbench.runs.record.sweeps import JobStatus
from tests.support.fake_run import job_in
from tests.support.results import PSNR, made_up, printed
from tests.support.run_folders import paint, score, write_run

MODEL = "infinity_tiny"
GOOD, BAD = "h2o-0.2-0123456789", "snapkv-0.2-0123456789"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference and two runs, an unfinished one, and a sweep with a worker and a stopped host."""
    root = tmp_path_factory.mktemp("whole")
    config = {"model": {"name": MODEL}, "prompts": {"count": 2}, "method": {}, "seed": 0}
    provenance = {"code": {"commit": "c0ffee"}, "classes": {"method": {"H2O": {"revision": 1}}}}
    for method in ("full", "h2o", "snapkv"):
        metrics = {} if method == "full" else {"psnr": score(PSNR, 20.0, 1.0, protocol="uint8", n=2)}
        name = {"run": "full-0"} if method == "full" else {}
        run = made_up(method, 0.2, metrics, n=2, config=config, provenance=provenance, **name)
        folder = write_run(
            root, run, [("a", {}, paint(9)), ("b", {}, paint(8))], values={"psnr-uint8": {"psnr": [19, 21]}}
        )
        retention = {"segment": 1, "sources": ["1x1"], "tokens": [1], "kept": [[[0.5]]], "prompts": 2}
        (folder / "retention.json").write_text(json.dumps({"schema_version": 1, **retention}))
    begun = root / MODEL / "rkv-0.1"
    begun.mkdir()
    (begun / "config.yaml").write_text("prompts: {count: 8}\n")
    (begun / "samples.jsonl").write_text('{"index": 0}\n')
    sweep = root / "sweeps" / "abc"
    (sweep / "workers").mkdir(parents=True)
    (sweep / "hosts").mkdir()
    (sweep / "sweep.json").write_text(json.dumps([["method=h2o"], ["method=snapkv"]]))
    for number, name in enumerate((GOOD, BAD)):
        run_folder = str(root / MODEL / name)
        outcome = JobStatus(number, (f"method={name[:3]}",), "finished", run_folder, samples={run_folder: 2})
        write_entry(sweep, outcome)
    lines = ({"host": "a", "device": "cpu", "at": 0}, {"run": "x", "samples": 2, "seconds": 4, "at": 4})
    (sweep / "workers" / "a-1-ffff.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (sweep / "hosts" / "b.json").write_text('{"reason": "no disk"}\n')
    other = root / "sweeps" / "def"
    other.mkdir()
    (other / "sweep.json").write_text('[["method=rkv"]]')
    return root


ANYTHING: Mapping[str, Callable[[str], str]] = {
    "empty": lambda _: "",
    "cut": lambda content: content[: len(content) // 2],
    "binary": lambda content: "\xff\0\x1b" + content,
    "deep": lambda _: "[" * 100_000 + "]" * 100_000,
    "list": lambda _: "[3]",
    "number": lambda _: "9" * 5000,
}
"""Damaged content by name: functions of a file's text."""
VALUES = {"HUGE": "1e999999999", "LONG": "9" * 5000, "DIGITS": "9" * 30, "SURROGATE": '"\\ud800"'}
FEW = ("cut", "binary", "deep")
DAMAGES: Mapping[str, Sequence[str]] = {
    f"{MODEL}/{BAD}/results.json": (
        *ANYTHING, "n=1000000000000", "n=0", "n=HUGE", "memory.peak_tokens=LONG", "memory.peak_bytes=true",
        "memory.budget_tokens=1e308", "memory.full_tokens=0", "memory.batch=0", "memory.least_share=NaN",
        "latency.seconds_per_image=HUGE", "latency=[]", "metrics.psnr.value=1e300", "metrics.psnr.digits=1000000000",
        "metrics.psnr.ci95=[1, 1e308]", 'metrics.psnr.better="both"', "metrics.psnr.n=-3", "method=SURROGATE",
        'run="../other"', 'reference=".."', 'reference="/etc"', "config=null", "config.prompts=[1]",
        'config.model.name="../.."', 'config.seed="1e999"', "provenance.resumed=[3]",
        'provenance.classes={"method": 3}', "provenance.weights_sha256=[]", "schema_version=HUGE",
    ),
    f"{MODEL}/{BAD}/samples.jsonl": (
        *FEW, "index=HUGE", "index=DIGITS", "index=-1", "index=[]", "prompt=[]",
        "prompt=SURROGATE", "seed=HUGE", "meta=[]",
    ),
    f"{MODEL}/{BAD}/metrics/psnr-uint8.samples.jsonl": (
        *FEW, "index=HUGE", "index=[]", "psnr=HUGE", "psnr=1e308", 'psnr="x"',
    ),
    f"{MODEL}/{BAD}/retention.json": ("binary", "kept=[[[1e308]]]", "kept=HUGE", "tokens=[9]", "segment=HUGE"),
    "sweeps/abc/sweep.json": (*FEW, "empty", "list"),
    "sweeps/abc/job-00001.json": (
        *FEW, "outcome=[3]", "samples=HUGE", 'samples={"a": 1e300}', "folder=[3]", "starts=HUGE", "overrides=[3]",
    ),
    "sweeps/abc/workers/a-1-ffff.jsonl": (*FEW, "host=[]", "at=HUGE", "at=LONG", "device=[]"),
    "sweeps/abc/hosts/b.json": (*FEW, "reason={}"),
}  # fmt: skip
"""Damages by file: names of `ANYTHING`, or key=value, set in its JSON object or in that of its first line."""


def damage(path: Path, what: str) -> None:
    content = path.read_text()
    if what in ANYTHING:
        content = ANYTHING[what](content)
    else:
        name, _, value = what.partition("=")
        first, _, rest = content.partition("\n") if path.suffix == ".jsonl" else (content, "", "")
        node = values = json.loads(first)
        *parents, key = name.split(".")
        for parent in parents:
            node = node[parent]
        node[key] = "@@"
        content = json.dumps(values).replace('"@@"', VALUES.get(value, value)) + f"\n{rest}"
    path.write_bytes(content.encode("latin-1"))


@pytest.mark.parametrize(("file", "what"), [(file, one) for file, own in DAMAGES.items() for one in own])
def test_a_damaged_file_is_named_and_the_rest_is_shown(
    whole: Path, tmp_path: Path, file: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    runs_dir = tmp_path / "runs"
    shutil.copytree(whole, runs_dir)
    damage(runs_dir / file, what)
    document = make_document(runs_dir)
    labels = {run["label"] for run in document["runs"]}
    assert {"full", "h2o"} <= labels
    assert len(json.dumps(document, allow_nan=False, default=str)) < 10**6
    text, sweep = printed(200, show_all, runs_dir), runs_dir / "sweeps/abc"
    assert "def" in text
    if file.endswith("sweep.json"):
        assert f"{runs_dir / file}: damaged" in text
        with pytest.raises(ConfigError, match=r"sweep\.json: damaged"):
            printed(200, show_status, sweep)
        return
    text = printed(300, show_status, sweep)
    assert "2 jobs" in text
    if file.endswith("job-00001.json"):
        assert "1 done, 0 running, 1 failed" in text
        assert "job-00001.json: damaged" in text.replace("\n", "")
    if file.startswith("sweeps"):
        return
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        runs = collect_runs(runs_dir)
        joined = combine_seeds(runs, runs_dir)
    printed(200, show_runs, joined)
    for run in runs:
        printed(200, show_run, run)
    tail = make_tail(runs_dir, joined)
    assert "| h2o |" in write_report(runs_dir, joined, [tail] if tail else []).read_text()
    if file.endswith("results.json"):
        [damaged] = document["damaged"]
        [line] = [one.message for one in caplog.records if one.message.startswith("left out: ")]
        assert damaged["folder"] == f"{MODEL}/{BAD}"
        assert all(f"{BAD}/results.json: " in text for text in (line, damaged["reason"]))
        assert (len(line.splitlines()), len(line) < 500) == (1, True)
        assert labels == {"full", "h2o"}
        runs = read_with_references([runs_dir / MODEL / name for name in (GOOD, BAD)])
        assert [run.method for run in runs] == ["h2o", "full"]


@pytest.mark.parametrize("time", [10**12, -(10**12)])
def test_a_time_that_no_calendar_has_stops_nothing(whole: Path, tmp_path: Path, time: int) -> None:
    runs_dir = tmp_path / "runs"
    shutil.copytree(whole, runs_dir)
    for path in runs_dir.rglob("*"):
        try:
            os.utime(path, (time, time))
        except (OverflowError, OSError):
            pytest.skip(f"this file system has no time {time}")
    document = make_document(runs_dir)
    assert len(document["runs"]) == 3
    assert [one["folder"] for one in document["unfinished"]] == [f"{MODEL}/rkv-0.1"]
    assert "abc" in printed(200, show_all, runs_dir)
    assert "2 jobs" in printed(200, show_status, runs_dir / "sweeps/abc")


def merge(run: Path) -> None:
    """Raise the problem of the run, of which nothing is written."""
    target = run.parents[2] / "target"
    [problem] = [one.problem for one in merge_runs(run.parents[1], target) if one.problem is not None]
    assert not [*target.glob(f"*/{run.name}/results.json")]
    raise ConfigError(problem)


def show(run: Path) -> None:
    """Read a dataset that was published whole, whose author then lists the files of the damaged run."""
    published = run.parents[2] / "set"
    shutil.copyfile(run / "samples.jsonl", published / f"runs/fake/{run.name}/samples.jsonl")
    (published / "SHA256SUMS").unlink()
    write_file_list(published)
    read_dataset(published)


def test_finished_runs_that_lost_records_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = execute.run(job_in(tmp_path / "runs", count=3)).folder
    prepare_dataset(read_published([run]), tmp_path / "set")
    records = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    (run / "images/000001.png").unlink()
    doors: Sequence[Callable[[Path], object]] = (
        merge,
        show,
        Run.read,
        lambda run: read_published([run]),
        lambda run: export_frames(run.parents[1], "csv", run.parents[2]),
    )
    for indices, count in (((0, 2), 2), ((0, 0, 2), 2), ((0, 1, 2, 3), 4), ((), 0)):
        lines = [json.dumps({**records[index % 3], "index": index}) + "\n" for index in indices]
        (run / "samples.jsonl").write_text("".join(lines))
        problem = rf"samples\.jsonl: has {count} records, results\.json has n = 3; start the run again"
        for door in doors:
            with pytest.raises(ValueError, match=problem):
                door(run)
    assert [one.method for one in collect_runs(run.parents[1])] == ["full"]
    assert f"left out: {run}/samples.jsonl: has 0 records" in caplog.text
