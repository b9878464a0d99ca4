"""Damaged runs and sweeps of every kind, and runs that lost records: named by every reader, and the rest is shown."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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

DEEP = "[" * 100_000 + "]" * 100_000
LONG = "9" * 5000
HUGE = "1e999999999"
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


def put(path: str, value: str) -> Callable[[str], str]:
    """Replace a value of a JSON object by a text, whatever it is."""

    def change(content: str) -> str:
        values: Any = json.loads(content)
        *parents, name = path.split(".")
        node = values
        for parent in parents:
            node = node[parent]
        node[name] = "@@"
        return json.dumps(values).replace('"@@"', value)

    return change


def put_line(path: str, value: str) -> Callable[[str], str]:
    def change(content: str) -> str:
        first, _, rest = content.partition("\n")
        return f"{put(path, value)(first)}\n{rest}"

    return change


ANYTHING: Mapping[str, Callable[[str], str]] = {
    "empty": lambda _: "",
    "cut": lambda content: content[: len(content) // 2],
    "binary": lambda content: "\xff\0\x1b" + content,
    "deep": lambda _: DEEP,
    "list": lambda _: "[3]",
    "number": lambda _: LONG,
}
RESULTS = {
    f"{path}={value[:12]}": put(path, value)
    for path, value in (
        ("n", "1000000000000"), ("n", "0"), ("n", HUGE), ("n", LONG), ("memory.peak_tokens", "9" * 400),
        ("memory.peak_bytes", "true"), ("memory.budget_tokens", "1e308"), ("memory.full_tokens", "0"),
        ("memory.batch", "0"), ("memory.least_share", "NaN"), ("latency.seconds_per_image", HUGE),
        ("latency", "[]"), ("metrics.psnr.value", "-Infinity"), ("metrics.psnr.value", "1e300"),
        ("metrics.psnr.digits", "1000000000"), ("metrics.psnr.ci95", "[1, 1e308]"), ("metrics.psnr.n", "-3"),
        ("metrics.psnr.better", '"both"'), ("method", '"\\ud800"'), ("run", '"../other"'),
        ("reference", '".."'), ("reference", '"/etc"'), ("config", "null"), ("config.prompts", "[1]"),
        ("config.model.name", '"../.."'), ("config.seed", f'"{HUGE}"'), ("config.budget", HUGE),
        ("provenance.resumed", "[3]"), ("provenance.classes", '{"method": 3}'), ("provenance.code", "[3]"),
        ("provenance.weights_sha256", "[]"), ("schema_version", HUGE),
    )
}  # fmt: skip
OTHERS = {
    "samples.jsonl": {
        f"{path}={value[:9]}": put_line(path, value)
        for path in ("index", "prompt", "seed", "meta")
        for value in (HUGE, "9" * 30, "[]", '"\\ud800"', "-1")
    },
    "metrics/psnr-uint8.samples.jsonl": {
        f"{path}={value[:9]}": put_line(path, value)
        for path in ("index", "psnr")
        for value in (HUGE, "1e308", "9" * 30, "[]", '"x"')
    },
    "retention.json": {
        f"{path}={value[:9]}": put(path, value)
        for path in ("kept", "tokens", "segment")
        for value in (HUGE, "[[[1e308]]]", "[9]")
    },
}
CASES = [
    *(("results.json", name, change) for name, change in (ANYTHING | RESULTS).items()),
    *(
        (file, name, change)
        for file, own in OTHERS.items()
        for name, change in ((ANYTHING if file != "retention.json" else {}) | own).items()
    ),
]


def report(runs_dir: Path) -> str:
    """What a report of all runs prints and writes."""
    runs = collect_runs(runs_dir)
    joined = combine_seeds(runs, runs_dir)
    shown = printed(200, show_runs, joined) + "".join(printed(200, show_run, run) for run in runs)
    tail = make_tail(runs_dir, joined)
    return shown + write_report(runs_dir, joined, [tail] if tail else []).read_text()


@pytest.mark.parametrize(
    ("file", "name", "change"), CASES, ids=lambda one: one if isinstance(one, str) else ""
)
def test_a_damaged_run_is_named_and_the_rest_is_shown(
    whole: Path,
    tmp_path: Path,
    file: str,
    name: str,
    change: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs_dir = tmp_path / "runs"
    shutil.copytree(whole / MODEL, runs_dir / MODEL)
    path = runs_dir / MODEL / BAD / file
    path.write_bytes(change(path.read_text()).encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        text = report(runs_dir)
    document = make_document(runs_dir)
    page = json.dumps(document, allow_nan=False, default=str)
    assert "| h2o |" in text
    labels = {run["label"] for run in document["runs"]}
    assert {"full", "h2o"} <= labels
    assert len(page) < 10**6
    if file == "results.json":
        [damaged] = document["damaged"]
        [line] = [one.message for one in caplog.records if one.message.startswith("left out: ")]
        assert damaged["folder"] == f"{MODEL}/{BAD}"
        assert f"{BAD}/results.json: " in line
        assert f"{BAD}/results.json: " in damaged["reason"]
        assert (len(line.splitlines()), len(line) < 500) == (1, True)
        assert labels == {"full", "h2o"}


def test_a_damaged_run_of_a_sweep_leaves_its_table(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / MODEL, tmp_path / MODEL)
    (tmp_path / MODEL / BAD / "results.json").write_text("{")
    runs = read_with_references([tmp_path / MODEL / name for name in (GOOD, BAD)])
    assert [run.method for run in runs] == ["h2o", "full"]


TIMES = (10**12, -(10**12), 2**62)


@pytest.mark.parametrize("time", TIMES)
def test_a_time_that_no_calendar_has_stops_nothing(whole: Path, tmp_path: Path, time: int) -> None:
    runs_dir = tmp_path / "runs"
    shutil.copytree(whole, runs_dir)
    for path in [
        *(runs_dir / MODEL).glob("*/*"),
        *(runs_dir / MODEL).iterdir(),
        *runs_dir.glob("sweeps/*/*"),
    ]:
        try:
            os.utime(path, (time, time))
        except (OverflowError, OSError):
            pytest.skip(f"this file system has no time {time}")
    document = make_document(runs_dir)
    assert len(document["runs"]) == 3
    assert [one["folder"] for one in document["unfinished"]] == [f"{MODEL}/rkv-0.1"]
    assert "abc" in printed(200, show_all, runs_dir)
    assert "2 jobs" in printed(200, show_status, runs_dir / "sweeps/abc")


SWEEP_CASES = [
    (file, name, change)
    for file, own in (
        ("sweep.json", {"jobs": lambda _: '[3, "x"]', "huge": lambda _: f"[[{HUGE}]]"}),
        (
            "job-00001.json",
            {
                f"{path}={value[:9]}": put(path, value)
                for path in ("outcome", "samples", "folder", "starts", "overrides")
                for value in (HUGE, "9" * 30, "[3]", '{"a": 1e300}')
            },
        ),
        (
            "workers/a-1-ffff.jsonl",
            {
                f"{path}={value[:9]}": put_line(path, value)
                for path in ("host", "at", "device")
                for value in (HUGE, LONG, "[]")
            },
        ),
        ("hosts/b.json", {"reason": lambda _: '{"reason": {}}'}),
    )
    for name, change in (ANYTHING | own).items()
]


@pytest.mark.parametrize(
    ("file", "name", "change"), SWEEP_CASES, ids=lambda one: one if isinstance(one, str) else ""
)
def test_a_damaged_file_of_a_sweep_leaves_status_and_page(
    whole: Path, tmp_path: Path, file: str, name: str, change: Callable[[str], str]
) -> None:
    runs_dir = tmp_path / "runs"
    shutil.copytree(whole, runs_dir)
    path = runs_dir / "sweeps/abc" / file
    path.write_bytes(change(path.read_text()).encode("latin-1"))
    text = printed(200, show_all, runs_dir)
    assert "def" in text
    assert len(make_document(runs_dir)["runs"]) == 3
    if file == "sweep.json":
        assert f"{path}: damaged" in text
        with pytest.raises(ConfigError, match=r"sweep\.json: damaged"):
            printed(200, show_status, runs_dir / "sweeps/abc")
        return
    text = printed(300, show_status, runs_dir / "sweeps/abc")
    assert "2 jobs" in text
    if file == "job-00001.json":
        assert "1 done, 0 running, 1 failed" in text
        assert "job-00001.json: damaged" in text.replace("\n", "")


# Finished runs that lost records


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return execute.run(job_in(tmp_path / "runs", count=3)).folder


def merge(run: Path) -> None:
    """Raise the problem of the run, of which nothing is written."""
    target = run.parents[2] / "target"
    [problem] = [one.problem for one in merge_runs(run.parents[1], target) if one.problem is not None]
    assert [path.parent.name for path in target.rglob("results.json")] == [
        path.name for path in run.parent.glob("full-*")
    ]
    raise ConfigError(problem)


def show(run: Path) -> None:
    """Read a dataset that was published whole, whose author then lists the files of the damaged run."""
    shutil.copyfile(run / "samples.jsonl", run.parents[2] / f"set/runs/fake/{run.name}/samples.jsonl")
    (run.parents[2] / "set/SHA256SUMS").unlink()
    write_file_list(run.parents[2] / "set")
    read_dataset(run.parents[2] / "set")


DOORS: dict[str, Callable[[Path], object]] = {
    "merge": merge,
    "publish": lambda run: read_published([run]),
    "export": lambda run: export_frames(run.parents[1], "csv", run.parents[2]),
    "api": Run.read,
    "dashboard": show,
}
LINES = {"0,2": 2, "0,0,2": 2, "0,1,2,3": 4, "": 0}
"""Indices of the records that a damaged file has, and their number."""


@pytest.mark.parametrize("door", DOORS)
def test_records_are_counted(run: Path, door: str, caplog: pytest.LogCaptureFixture) -> None:
    prepare_dataset(read_published([run]), run.parents[2] / "set")
    records = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    (run / "images/000001.png").unlink()
    for indices, count in LINES.items():
        chosen = [int(index) for index in indices.split(",") if index]
        lines = [json.dumps({**records[index % 3], "index": index}) + "\n" for index in chosen]
        (run / "samples.jsonl").write_text("".join(lines))
        problem = rf"samples\.jsonl: has {count} records, results\.json has n = 3; start the run again"
        with pytest.raises(ValueError, match=problem):
            DOORS[door](run)
    assert [one.method for one in collect_runs(run.parents[1])] == ["full"]
    assert f"left out: {run}/samples.jsonl: has 0 records" in caplog.text
