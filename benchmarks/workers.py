"""Wall time of a sweep of 12 methods at 3 budgets by one worker, and by several at a time, with a thread each.

python -m benchmarks workers [--prompts 96] [--workers 2] [--batch 8] [--eval psnr]

Every sweep starts from an empty folder. What the workers leave is compared with what one leaves, times left out.
"""

import argparse
import hashlib
import json
import tempfile
from pathlib import Path

from benchmarks.support.arguments import Option
from benchmarks.support.timing import time_processes

METHODS = (
    *("full", "random", "streaming_llm", "swa", "snapkv", "h2o", "rkv", "scalekv", "hack"),
    *("ams_kv_fixed", "heatkv_naive", "heatkv"),
)
BUDGETS = ("0.1", "0.2", "0.4")
TIMES = ("seconds", "latency", "started", "finished")
"""Keys of JSON files whose values are times."""


def time_sweep(runs_dir: Path, workers: int, words: list[str]) -> float:
    """Return the seconds until so many workers, started at once, have finished a sweep."""
    sweep = [f"method={','.join(METHODS)}", f"budget={','.join(BUDGETS)}", f"runs_dir={runs_dir}", *words]
    return time_processes([["task=work", *sweep]] * workers, threads=1)


def drop_times(value: object) -> object:
    """Return JSON values without times."""
    if isinstance(value, dict):
        return {key: drop_times(item) for key, item in value.items() if key not in TIMES}
    return [drop_times(item) for item in value] if isinstance(value, list) else value


def read_file(path: Path, runs_dir: Path) -> str:
    """Return a file's hash; of JSON, that of its values without times and without where the runs are."""
    content = path.read_bytes()
    if path.suffix in (".json", ".jsonl"):
        lines = [content] if path.suffix == ".json" else content.splitlines()
        content = json.dumps([drop_times(json.loads(line)) for line in lines]).encode()
    return hashlib.sha256(content.replace(str(runs_dir).encode(), b"")).hexdigest()


def read_runs(runs_dir: Path) -> dict[str, str]:
    """Return what stands in the run folders, by path."""
    files = [path for path in sorted((runs_dir / "infinity_tiny").rglob("*")) if path.is_file()]
    return {str(path.relative_to(runs_dir)): read_file(path, runs_dir) for path in files}


OPTIONS = {
    "prompts": 96, "batch": 8, "workers": Option(2, "processes at a time"), "eval": Option("psnr", "of conf/eval"),
}  # fmt: skip


def main(options: argparse.Namespace) -> int:
    """Print seconds, their ratio, and how many files are compared; return 1 if any differ."""
    words = [f"prompts.count={options.prompts}", f"batch_size={options.batch}", f"eval={options.eval}"]
    with tempfile.TemporaryDirectory() as folder:
        one, several = Path(folder, "one"), Path(folder, "several")
        alone = time_sweep(one, 1, words)
        print(f"| 1 worker | {alone:.1f} s | 1.00 |", flush=True)
        seconds = time_sweep(several, options.workers, words)
        print(f"| {options.workers} workers | {seconds:.1f} s | {seconds / alone:.2f} |", flush=True)
        known, found = read_runs(one), read_runs(several)
        other = [name for name in sorted({*known, *found}) if known.get(name) != found.get(name)]
        print(f"{len(known)} files, {len(other)} of them differ: {', '.join(other[:3]) or 'the same bytes'}")
    return int(bool(other))
