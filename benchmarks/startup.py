"""Seconds of commands that generate nothing, and until a sweep starts its first image.

Each command runs in its own process. `processor` is its processor time, and `first line` the wall time until it prints
one. Sweeps are 8 methods x 6 budgets x `--seeds` of one image of `infinity_tiny`. All of them are finished first, which
takes minutes. `--program` measures the `run.py` of another checkout. First it counts the functions of kvbench that the
main job enters, each once, until its configuration is read and from there to its first generation.

python -m benchmarks startup [--seeds 4] [--repeats 3] [--runs /tmp/runs] [--program ../other/run.py]
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.support.arguments import HELP, Option
from benchmarks.support.processes import measure, start
from benchmarks.support.table import Table

OPTIONS = {
    "seeds": Option(4, "seeds of the sweep, which has 48 jobs for each"),
    "repeats": Option(3, HELP["repeats"]),
    "runs": Option(
        None, "folder of the sweep's runs, which later calls find again; a temporary one by default"
    ),
    "program": Option("run.py", "program to measure"),
}
METHODS = ("random", "streaming_llm", "swa", "snapkv", "h2o", "sta", "rkv", "hack")
BUDGETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
ONE_IMAGE = ("prompts.count=1", "eval=none", "batch_size=1", "device=cpu")
POLL = 0.01
"""Seconds between two checks for the first block."""

COUNT = """
import inspect, os, sys
from pathlib import Path
from kvbench.cli import entry

entered, read = set(), []

def note(frame, event, _):
    code = frame.f_code
    if not code.co_filename.startswith(str(Path(entry.__file__).parents[1])):
        return
    if event == "return" and code.co_name == "read_values" and not read:
        read.append(len(entered))
    if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<"):
        entered.add((code.co_filename, code.co_firstlineno))
        if code.co_name == "generate":
            print(read[0], len(entered) - read[0], flush=True)
            os._exit(0)

sys.setprofile(note)
entry.main()
"""
"""Program that counts the functions that a job enters; bodies of modules, classes and comprehensions do not count."""


def main(options: argparse.Namespace) -> None:
    """Measure every command and print its medians.

    Raises:
        ValueError: the program's file does not exist.
    """
    program = Path(options.program).resolve()
    if not program.is_file():
        raise ValueError(f"--program {options.program}: no such file; call it in a checkout")
    sweep = (f"method={','.join(METHODS)}", f"budget={','.join(map(str, BUDGETS))}", *ONE_IMAGE)
    sweep = ("-m", *sweep, f"seed={','.join(map(str, range(options.seeds)))}")
    with TemporaryDirectory() as folder:
        read, rest = count_functions(program, ("method=heatkv", "budget=0.04", f"runs_dir={folder}/count"))
        print(f"functions entered: {read} until the configuration is read, {rest} to the first generation")
        runs = f"runs_dir={Path(options.runs or Path(folder) / 'sweep').resolve()}"
        run = (*ONE_IMAGE, "method=random", "budget=0.1", f"runs_dir={folder}/one")
        measure(program, sweep := (*sweep, runs))  # the sweep finishes the missing runs
        measure(program, run)
        table = Table({"processor": ".2f", "end": ".2f", "first line": ".2f"}, "seconds", 24)
        for name, args in (
            ("--help", ("--help",)),
            ("method=nope", ("method=nope",)),
            ("seed=abc", ("seed=abc",)),
            ("--cfg job", ("--cfg", "job")),
            ("a finished run", run),
            ("task=status", ("task=status", *sweep[1:])),
            ("task=merge", ("task=merge", f"from={folder}/one", f"runs_dir={folder}/merged")),
            ("task=report", ("task=report", f"runs_dir={folder}/one")),
            (f"{48 * options.seeds} finished jobs", sweep),
        ):
            costs = [measure(program, args) for _ in range(options.repeats)]
            lines = [cost.first_line for cost in costs if cost.first_line is not None]
            table.add(
                name,
                median(cost.processor for cost in costs),
                median(cost.end for cost in costs),
                median(lines or [0.0]),
            )
        fresh = (*sweep[:-1], f"runs_dir={folder}/fresh")
        table.add("until the first image", None, time_first_image(program, fresh, Path(folder)))


def count_functions(program: Path, overrides: Sequence[str]) -> tuple[int, int]:
    """Return how many functions a job enters until its configuration is read, and then until it generates."""
    command = [sys.executable, "-c", COUNT, *overrides, "device=cpu"]
    environment = os.environ | {"PYTHONPATH": str(program.parent)}
    done = subprocess.run(command, cwd=program.parent, env=environment, capture_output=True, check=True)
    read, rest = done.stdout.split()[-2:]
    return int(read), int(rest)


def time_first_image(program: Path, args: Sequence[str], folder: Path) -> float:
    """Return the seconds of wall time until a sweep claims the first block of its prompts; then end the sweep."""
    began = time.monotonic()
    process = start(program, args)
    try:
        while process.poll() is None and not any(folder.glob("fresh/*/*/.block-*")):
            time.sleep(POLL)
        return time.monotonic() - began
    finally:
        process.kill()
        process.communicate()
