"""The rest of the time: every path of attention measured at real shapes, `benchmarks/kernels.py --paths`."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.gpu_steps.base import Case, Failed, Figures, Machine
from benchmarks.support.build import ROOT


def list_cases(machine: Machine) -> Iterator[Case]:
    """Yield the table of each model; a rehearsal measures the embedded one."""
    for model in machine.choose(("infinity_2b", "infinity_8b", "var_d30"), ("infinity_tiny",)):
        yield Case(f"paths of attention, {model}", partial(measure, machine, model))


def measure(machine: Machine, model: str) -> Figures:
    """Return the table of times that belongs into `kernels/attention_paths.json`.

    Raises:
        Failed: the benchmark fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "paths.json")
        words = ["-m", "benchmarks", "kernels", "--quick", "--model", model, "--paths", str(table)]
        command = [sys.executable, *words, "--device", machine.device, "--batch", machine.choose("8", "1")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise Failed((done.stderr.strip().splitlines() or ["no output"])[-1])
        return {"lines": done.stdout.splitlines(), "table": json.loads(table.read_text())}
