"""Processor time and memory of `task=dashboard` and `task=report` for a folder of many generated runs.

python -m benchmarks many_runs [2600] [--prompts 256] [--folder /tmp/many]
The runs are written if the folder has none (1.1 GB for 2600). Then each task starts twice, each time in a new process:
the second finds what the first cached. Runs differ in model, method, budget and seed; their values are random.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.support.arguments import Option
from benchmarks.support.build import ROOT
from benchmarks.support.processes import measure
from benchmarks.support.table import Table
from kvbench.eval.protocol.scores import MetricSpec, make_metric, mean_score, share_score
from kvbench.runs.record.results import FILE, Evaluated, Latency, Memory, Results

OPTIONS = {
    "count": Option(2600, "number of runs, without references", positional=True, nargs="?"),
    "prompts": Option(256, "prompts of a run"),
    "folder": Option(None, "folder of the runs, kept afterwards; a temporary folder by default"),
}
MODELS = ("infinity_2b", "infinity_8b")
METHODS = (
    "heatkv", "scalekv", "snapkv", "streaming_llm", "h2o", "pyramidkv", "random", "first_scales", "headkv", "cur",
    "hack", "swa", "ams_kv",
)  # fmt: skip
BUDGETS = (0.02, 0.04, 0.05, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5)
TASKS = ("dashboard", "report")
TOKENS = 9288
"""Full-cache tokens per sequence in all records."""
EVALUATORS: Mapping[str, Mapping[str, MetricSpec]] = {
    "psnr-uint8": {"psnr": MetricSpec("higher", "dB", 2)},
    "ssim-gaussian11": {"ssim": MetricSpec("higher"), "ssim_tm": MetricSpec("higher", detail=True)},
    "lpips_scenes-unit": {"lpips_scenes": MetricSpec("lower")},
    "geneval-scenes": {"geneval[scenes]": MetricSpec("higher", digits=3)},
}
"""Specifications of metrics by name, by the stem of their evaluator's file."""


def main(options: argparse.Namespace) -> None:
    """Print a row per task and turn.

    Raises:
        ValueError: a task failed.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        if not any(folder.glob(f"*/*/{FILE}")):
            started = time.perf_counter()
            for run in make_runs(options.count, options.prompts):
                write_run(folder, run, options.prompts)
            print(f"written: {folder} ({time.perf_counter() - started:.0f} s)")
        table = Table({"CPU s": ".1f", "MiB": ".0f"}, "task")
        for task, turn in product(TASKS, ("first", "again")):
            cost = measure(ROOT / "run.py", (f"task={task}", f"runs_dir={folder.resolve()}"))
            if cost.status:
                raise ValueError(f"task={task} failed; run it with runs_dir={folder} to see its error")
            table.add(f"{task}, {turn}", cost.processor, cost.mebibytes)


def make_runs(count: int, prompts: int) -> Iterator[Results]:
    """Yield `count` runs, and the reference of each model and seed before its first run."""
    each = len(MODELS) * len(METHODS) * len(BUDGETS)
    settings = product(range(-(-count // each)), MODELS, METHODS, BUDGETS)
    references = set()
    for _, (seed, model, method, budget) in zip(range(count), settings, strict=False):
        if (seed, model) not in references:
            references.add((seed, model))
            yield make_run(model, "full", 1.0, seed, prompts)
        yield make_run(model, method, budget, seed, prompts)


def make_run(model: str, method: str, budget: float, seed: int, prompts: int) -> Results:
    """Return the results of a run, with the metrics of its `draw_values`."""
    number = abs(hash((MODELS.index(model), (*METHODS, "full").index(method), budget, seed))) % 10**10
    values = draw_values(budget, number, prompts)
    full = method == "full"
    metrics = {}
    for stem, specs in EVALUATORS.items():
        evaluator, _, protocol = stem.partition("-")
        for name, spec in specs.items():
            score = (share_score if name.startswith("geneval") else mean_score)(values[name].tolist())
            about = {"evaluator": evaluator, "protocol": protocol, "needs_reference": "geneval" not in name}
            metrics[name] = make_metric(score, spec, **about)
    tokens = int(TOKENS * budget)
    return Results(
        run=f"{method}-{budget:g}-{number:010d}" if not full else f"full-{seed}",
        reference=None if full else f"full-{seed}",
        method=method,
        n=prompts,
        config=make_config(model, method, budget, seed, prompts),
        provenance={
            "code": {"commit": "c" * 40, "diff_sha256": ""},
            "versions": {f"package-{place}": "1.0" for place in range(20)},
            "device": "cpu",
            "started": f"2026-01-01T00:{number % 60:02}:00+00:00",
        },
        memory=Memory(
            budget_tokens=TOKENS * budget, peak_tokens=tokens, full_tokens=TOKENS, peak_bytes=8192 * tokens,
            full_bytes=8192 * TOKENS, rebuild_bytes=9000 * tokens, transient_bytes=2**20, state_bytes=0,
            gpu_peak_bytes=0, batch=8, paper_full_mib=24.7, paper_peak_mib=24.7 * budget, last_tokens=tokens,
            least_share=1.0, sequence_bytes=1024 * tokens, full_sequence_bytes=1024 * TOKENS, last_bytes=1024 * tokens,
        ),
        latency=Latency(0.1 + number / 1e12, 0.1, 10.0, 8, "cpu", "a processor", prompts),
        evaluated={stem.partition("-")[0]: Evaluated({"batch": 8}, "ok", "1") for stem in EVALUATORS},
        metrics=metrics,
        finished="2026-01-01T00:00:00+00:00",
    )  # fmt: skip


def make_config(model: str, method: str, budget: float, seed: int, prompts: int) -> dict[str, object]:
    """Return a configuration about as long as a real run's."""
    return {
        "task": "run", "budget": budget, "sinks": 1, "seed": seed, "batch_size": 8, "device": "cpu",
        "cache_dtype": "auto",
        "model": {"name": model, "sampling": {"cfg": 2.5, "tau": [1.0, 0.5, 0.4], "top_k": 900, "top_p": 0.97}},
        "method": {"_target_": f"kvbench.methods.{method}", "sinks": 1, "window": 8, "pool": "max", "kernel": 5},
        "prompts": {"_target_": "kvbench.prompts.scenes.Scenes", "count": prompts, "seed": 0},
        "calibrate": {"count": 10, "prompts": None, "seed": 1, "orders": None},
        "eval": {stem: {"_target_": f"kvbench.eval.{stem}", "batch": 8, "path": None} for stem in EVALUATORS},
        "train": {f"stage {n}": {"scales": n, "batch": 128, "steps": 1200, "rate": 1e-3} for n in range(40)},
    }  # fmt: skip


def draw_values(budget: float, number: int, prompts: int) -> dict[str, np.ndarray]:
    """Return random values float64 [prompts] by metric; quality grows with the budget."""
    rng = np.random.default_rng(number)
    noise = rng.normal(size=prompts)
    return {
        "psnr": 20 + 12 * budget + 3 * noise,
        "ssim": 1 - 0.1 * (1 - budget) * np.exp(0.3 * noise),
        "ssim_tm": 1 - 0.05 * (1 - budget) * np.exp(0.3 * noise),
        "lpips_scenes": 0.2 * (1 - budget) * np.exp(0.4 * noise),
        "geneval[scenes]": (rng.random(prompts) < 0.5 + 0.4 * budget).astype(float),
    }


def write_run(folder: Path, run: Results, prompts: int) -> None:
    """Write the records of a run, about as many bytes as a real run's without its images."""
    run_folder = folder / run.model / run.run
    (run_folder / "metrics").mkdir(parents=True)
    (run_folder / "status").write_text("done\n")
    seed = int(str(run.setting("seed")))
    lines = [json.dumps(_make_record(index, seed, run)) + "\n" for index in range(prompts)]
    (run_folder / "samples.jsonl").write_text("".join(lines))
    values = draw_values(run.memory.budget, int(run.run.rpartition("-")[2]), prompts)
    for stem, specs in EVALUATORS.items():
        rows = [
            {"index": index, **{name: float(values[name][index]) for name in specs}}
            for index in range(prompts)
        ]
        (run_folder / "metrics" / f"{stem}.samples.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    (run_folder / FILE).write_text(run.to_json())


def _make_record(index: int, seed: int, run: Results) -> dict[str, object]:
    prompt = f"a scene with number {index} of things"
    costs = {
        key: getattr(run.memory, key)
        for key in ("peak_tokens", "peak_bytes", "rebuild_bytes", "sequence_bytes")
    }
    meta = {"tag": "counting", "include": [{"class": "ring", "count": 1}], "exclude": [], "prompt": prompt}
    return {
        "index": index, "prompt": prompt, "meta": meta, "seed": seed * 1000 + index, "batch": 8, "seconds": 0.1113,
        **costs, "state_bytes": 0, "gpu_peak_bytes": 0, "utilisation": 0.13, "sha256": f"{index:064x}",
    }  # fmt: skip
