"""Check of this machine's GPU in ten minutes: correct results, freed memory, speed.

python -m benchmarks gpu_check                        all steps, a line each, and gpu-check.json for an issue
python -m benchmarks gpu_check --only kernels graphs  some steps
python -m benchmarks gpu_check --mode interpreted     a rehearsal on a CPU: small shapes, kernels interpreted

Each step runs in a separate process with a time limit; other steps run even if it fails. Without a GPU the check is a
rehearsal, which only shows that the check itself runs. The exit status is 1 if a step failed.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvbench
from benchmarks.gpu_steps.base import MODES, Case, Machine, run_cases
from benchmarks.support.arguments import Option
from benchmarks.support.build import ROOT
from benchmarks.support.interpreter import adapt_language_once
from kvbench.core.devices import count_gpus
from kvbench.core.files import write_whole

REPORTED_LINES = 100
"""Maximum number of last output lines of a failed step in the report."""
REHEARSAL_LIMIT = 300
"""Maximum seconds of each step of a rehearsal."""


@dataclass(frozen=True)
class Step:
    """One step, which runs in a separate process.

    Attributes:
        name: name of its module in `benchmarks.gpu_steps`.
        title: short description.
        limit: timeout in seconds.
        interprets: whether a rehearsal interprets Triton kernels; else it compiles them.
    """

    name: str
    title: str
    limit: int
    interprets: bool = True

    @property
    def list_cases(self) -> Callable[[Machine], Iterator[Case]]:
        """Return the function `list_cases` of the step's module, which yields its cases."""
        module = importlib.import_module(f"benchmarks.gpu_steps.{self.name}")
        cases: Callable[[Machine], Iterator[Case]] = module.list_cases
        return cases


STEPS = {
    step.name: step
    for step in (
        Step("machine", "versions, the GPU, every kernel compiled for its limits", 120, interprets=False),
        Step("kernels", "kernels against double precision, a graph", 120),
        Step("models", "embedded models against the CPU, in float32 and 16 bits", 180),
        Step("graphs", "graphs on and off, out of memory", 60),
        Step("cards", "two GPUs: equal bytes, two workers, tensor parallelism", 90),
        Step("infinity", "Infinity-2B by random weights: time, idle time, memory, shares", 200),
        Step("llamagen", "LlamaGen-XL by random weights: tokens per second, noise", 120),
        Step("paths", "attention paths measured", 300),
    )
}

OPTIONS = {
    "only": Option(list(STEPS), "steps", choices=list(STEPS)),
    "mode": Option(None, "card, interpreted or smallest; card if there is a GPU", choices=MODES),
    "seconds": Option(600, "time limit of all steps together"),
    "out": Option("gpu-check.json", "file of results"),
    "step": Option(None, "run this step in this process (used by the check)", choices=list(STEPS)),
}


def main(options: argparse.Namespace) -> int:
    """Run the steps and print a line each; return 1 if one failed."""
    mode = options.mode or ("card" if count_gpus() else "interpreted")
    if options.step:
        run_step(STEPS[options.step], mode, Path(options.out))
        return 0
    if mode != "card":
        print("no GPU: this is a rehearsal with small shapes, which says nothing about a GPU", flush=True)
    started, results = time.monotonic(), list[dict[str, Any]]()
    for name in options.only:
        left = options.seconds - (time.monotonic() - started)
        results.append(conduct(STEPS[name], mode, left))
        print_step(results[-1])
        report = {"schema": 1, "kvbench": kvbench.__version__, "mode": mode, "steps": results}
        write_whole(Path(options.out), json.dumps(report, indent=1))
    failed = [step["name"] for step in results if step["state"] == "FAIL"]
    print(f"{options.out}: {'failed: ' + ', '.join(failed) if failed else 'no step failed'}")
    return int(bool(failed))


def run_step(step: Step, mode: str, file: Path) -> None:
    """Run a step's cases in this process and write their outcomes."""
    machine = Machine(mode)
    if os.environ.get("TRITON_INTERPRET") == "1":
        adapt_language_once()
    with machine.in_use():
        run_cases(step.list_cases(machine), file)


def conduct(step: Step, mode: str, left: float) -> dict[str, Any]:
    """Run a step in a separate process, within the seconds left for all steps; return its result in JSON values."""
    limit = min(left, step.limit if mode == "card" else REHEARSAL_LIMIT)
    about = {"name": step.name, "title": step.title}
    if limit < 1:
        return about | {"state": "SKIP", "reason": "no time is left", "seconds": 0, "cases": []}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "cases.json")
        args = ["-m", "benchmarks", "gpu_check", "--step", step.name, "--mode", mode, "--out", str(file)]
        error, output = call([sys.executable, *args], choose_environment(step, mode), limit)
        cases = json.loads(file.read_text()) if file.is_file() else []
    state, reason = judge(cases, error)
    seconds = round(time.monotonic() - started, 1)
    result = about | {"state": state, "reason": reason, "seconds": seconds, "cases": cases}
    return result | ({"output": output} if error else {})


def choose_environment(step: Step, mode: str) -> dict[str, str]:
    """Return the environment of a step's process; a rehearsal hides GPUs and may interpret kernels."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if mode == "card":
        return environment
    return environment | {"CUDA_VISIBLE_DEVICES": ""} | ({"TRITON_INTERPRET": "1"} if step.interprets else {})


def call(command: Sequence[str], environment: Mapping[str, str], limit: float) -> tuple[str, list[str]]:
    """Run a command from the checkout; return why it did not finish, or an empty string, and its last lines."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        lines = output.read().strip().splitlines()[-REPORTED_LINES:]
    if status is None:
        return f"stopped after {limit:.0f} s", lines
    return f"exit status {status}: {lines[-1] if lines else 'no output'}" if status else "", lines


def judge(cases: Sequence[Mapping[str, Any]], error: str) -> tuple[str, str]:
    """Return a step's state and one-line reason, from outcomes as JSON and the process's `error`, empty if it ended."""
    failed = [case for case in cases if case["state"] == "FAIL"]
    skipped = [case for case in cases if case["state"] == "SKIP"]
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return "FAIL", f"{failed[0]['name']}: {failed[0]['reason']}{more}" + (f"; {error}" if error else "")
    if error:
        return "FAIL", f"{error}; {len(cases)} cases passed before"
    if len(skipped) == len(cases):
        return "SKIP", skipped[0]["reason"] if skipped else "no case"
    return "PASS", f"{len(cases) - len(skipped)} cases" + (f", {len(skipped)} skipped" if skipped else "")


def print_step(step: Mapping[str, Any]) -> None:
    """Print a step's line, and a line for each further failed case."""
    print(f"{step['state']}  {step['name']:10} {step['seconds']:6.1f} s  {step['reason']}", flush=True)
    failed = [case for case in step["cases"] if case["state"] == "FAIL"]
    for case in failed[1:]:
        print(f"      {case['name']}: {case['reason']}", flush=True)
