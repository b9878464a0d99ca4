"""Step that measures every attention path at real shapes (`python -m benchmarks kernels --paths`)."""

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.gpu_steps.base import Case, Figures, Machine, call_python


def list_cases(machine: Machine) -> Iterator[Case]:
    """Yield a case per model; a rehearsal measures the embedded model."""
    for model in machine.choose(("infinity_2b", "infinity_8b", "var_d30"), ("infinity_tiny",)):
        yield Case(f"paths of attention, {model}", partial(measure, machine, model))


def measure(machine: Machine, model: str) -> Figures:
    """Return the printed lines and the table of times for `kernels/attention_paths.json`."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "paths.json")
        args = ["-m", "benchmarks", "kernels", "--repeats", "5", "--model", model, "--paths", str(table)]
        [printed] = call_python([*args, "--device", machine.device, "--batch", machine.choose("8", "1")])
        return {"lines": printed.splitlines(), "table": json.loads(table.read_text())}
