"""Time of opening many runs as a frame, uncached and cached: `python -m benchmarks rows 20000`.

Runs are generated in a temporary folder: results.json of the size that a run of the embedded model leaves, all
different, with two thousand runs to a model. Prints CPU seconds of the process, all its threads together.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import kvbench
from benchmarks.support.arguments import Option
from kvbench.eval.protocol.scores import Metric
from kvbench.runs.record.results import Latency, Memory, Results

METRICS = (
    "psnr",
    "ssim",
    "ssim_tm",
    "lpips_scenes",
    "fid_scenes",
    "kid_scenes",
    "precision_scenes",
    "recall_scenes",
)
METRICS += tuple(
    f"geneval[scenes]{part}" for part in ("", "/colors", "/counting", "/position", "/single_object")
)
METHODS = ("heatkv", "random", "snapkv", "scalekv", "streaming_llm")
A_MODEL = 2000
FRESH = "import sys, time, kvbench; kvbench.runs_df(sys.argv[1]); print(time.process_time())"


def make_runs(count: int) -> Iterator[Results]:
    """Yield finished runs that differ in model, method, budget, seed and every number."""
    for number in range(count):
        method, budget = METHODS[number % len(METHODS)], (number % 97 + 1) / 100
        metrics = {
            name: Metric(
                number / (place + 7), "higher", n=96, ci95=(number / 9, number / 5), ci="bootstrap, 2000 resamples",
                evaluator=name.partition("/")[0], protocol="uint8", needs_reference=True,
            )
            for place, name in enumerate(METRICS)
        }  # fmt: skip
        yield Results(
            run=f"{method}-{budget:g}-{number:010x}",
            reference="full-0123456789",
            method=method,
            n=96,
            config=make_config(f"model_{number // A_MODEL}", number),
            provenance={"code": {"commit": f"{number:040x}"}, "versions": {f"package {n}": "1.0" for n in range(20)}},
            memory=Memory(
                budget_tokens=9288 * budget, peak_tokens=int(9288 * budget), full_tokens=9288, peak_bytes=number,
                full_bytes=2**26, rebuild_bytes=number, transient_bytes=2**20, batch=8, paper_full_mib=24.7,
                paper_peak_mib=24.7 * budget, state_bytes=0, gpu_peak_bytes=0, last_tokens=number, least_share=1.0,
                sequence_bytes=number, full_sequence_bytes=2**23, last_bytes=number,
            ),
            latency=Latency(0.1 + number / 1e6, 0.1, 10.0, 8, "cpu"),
            metrics=metrics,
            finished="2026-01-01T00:00:00+00:00",
        )  # fmt: skip


def make_config(model: str, number: int) -> dict[str, object]:
    """Return a configuration about as long as a real one."""
    return {
        "task": "run", "budget": 0.1, "sinks": 1, "seed": number, "batch_size": 8, "device": "cpu",
        "model": {"name": model, "sampling": {"cfg": 2.5, "tau": [1.0, 0.5, 0.4], "top_k": 900, "top_p": 0.97}},
        "method": {"sinks": 1, "window": number % 32, "pool": "max", "kernel": 5, "rows": "shared"},
        "prompts": {"_target_": "kvbench.prompts.scenes.Scenes", "count": 96, "seed": 0},
        "calibrate": {"count": 10, "prompts": None, "seed": 1, "orders": None},
        "eval": {name: {"_target_": f"kvbench.eval.{name}", "batch": 8, "path": None} for name in METRICS},
        "train": {f"stage {n}": {"scales": n, "batch": 128, "steps": 1200, "rate": 1e-3} for n in range(40)},
    }  # fmt: skip


def write_runs(root: Path, count: int) -> int:
    """Write so many run folders; return the bytes of their results."""
    size = 0
    for run in make_runs(count):
        folder = root / run.model / run.run
        folder.mkdir(parents=True)
        size += (folder / "results.json").write_text(run.to_json())
    return size


def time_opening(root: Path) -> tuple[float, int, int]:
    """Return CPU seconds of one call, and how many rows and columns it gave."""
    started = time.process_time()
    rows, columns = kvbench.runs_df(root).shape
    return time.process_time() - started, rows, columns


OPTIONS = {"runs": Option(20_000, "runs to open", positional=True, nargs="?")}


def main(options: argparse.Namespace) -> None:
    """Print seconds, cached and not, in this process and in one of its own."""
    count = options.runs
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "runs"
        size = write_runs(root, count)
        print(f"{count} runs, {size / count / 1024:.1f} KiB of results.json each")
        started = time.process_time()
        __import__("polars")
        print(f"import of polars       {time.process_time() - started:8.2f} s of CPU")
        for name in ("uncached", "cached", "cached again"):
            seconds, rows, columns = time_opening(root)
            print(f"{name:<22} {seconds:8.2f} s of CPU, {rows} rows of {columns} columns")
        touched = next(root.glob("*/*/results.json"))
        touched.write_text(touched.read_text() + " ")
        print(f"one run changed        {time_opening(root)[0]:8.2f} s of CPU")
        fresh = subprocess.run(
            [sys.executable, "-c", FRESH, str(root)], capture_output=True, text=True, check=True
        )
        print(f"cached, a new process  {float(fresh.stdout):8.2f} s of CPU, imports included")
        print(f"cache: {(root / '.rows.parquet').stat().st_size / count / 1024:.1f} KiB a run")
