"""A check of this machine's GPU in ten minutes: right numbers, memory that comes back, speed.

python -m benchmarks gpu_check                        all steps, a line each, and gpu-check.json to paste into an issue
python -m benchmarks gpu_check --only kernels graphs  some steps
python -m benchmarks gpu_check --mode interpreted     a rehearsal on a CPU: small shapes, kernels interpreted

Steps run in processes of their own, each with a time limit, and go on after a failure. A machine without a GPU
rehearses, which says nothing about any GPU, only that the check itself runs. The exit status is 1 if a step failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kvbench
from benchmarks.gpu_steps.base import MODES, Machine, run_cases
from benchmarks.gpu_steps.table import STEPS, Step
from benchmarks.support.arguments import Option
from benchmarks.support.build import ROOT
from benchmarks.support.interpreter import adapt_language_once
from kvbench.core.devices import count_gpus
from kvbench.core.files import write_whole

SHOWN = 100
"""Lines of the output of a step that broke, in the report."""
REHEARSED = 300
"""Seconds that a step of a rehearsal may take."""
Case = Mapping[str, Any]
"""An `Outcome` of a case as JSON has it."""

OPTIONS = {
    "only": Option(list(STEPS), "steps", choices=list(STEPS)),
    "mode": Option(None, "card, interpreted or smallest; by whether there is a GPU", choices=MODES),
    "seconds": Option(600, "for all steps together"),
    "out": Option("gpu-check.json", "file of all results"),
    "step": Option(None, "do this step in this process; what the check calls", choices=list(STEPS)),
}


def main(options: argparse.Namespace) -> int:
    """Run the steps and print a line each; return whether one failed."""
    mode = options.mode or ("card" if count_gpus() else "interpreted")
    if options.step:
        run_step(STEPS[options.step], mode, Path(options.out))
        return 0
    if mode != "card":
        print("no GPU is used: a rehearsal at small shapes, which says nothing about a card", flush=True)
    started, found = time.monotonic(), list[dict[str, Any]]()
    for name in options.only:
        left = options.seconds - (time.monotonic() - started)
        found.append(conduct(STEPS[name], mode, left))
        print_step(found[-1])
        report = {"schema": 1, "kvbench": kvbench.__version__, "mode": mode, "steps": found}
        write_whole(Path(options.out), json.dumps(report, indent=1))
    failed = [step["name"] for step in found if step["state"] == "FAIL"]
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
    """Run a step in a process of its own and return what became of it, in JSON values.

    Args:
        step: to run.
        mode: one of `MODES`.
        left: seconds that all steps still have.
    """
    limit = min(left, step.limit if mode == "card" else REHEARSED)
    about = {"name": step.name, "title": step.title}
    if limit < 1:
        return about | {"state": "SKIP", "reason": "no time is left", "seconds": 0, "cases": []}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "cases.json")
        words = ["-m", "benchmarks", "gpu_check", "--step", step.name, "--mode", mode, "--out", str(file)]
        error, output = call([sys.executable, *words], choose_environment(step, mode), limit)
        cases = json.loads(file.read_text()) if file.is_file() else []
    state, reason = judge(cases, error)
    seconds = round(time.monotonic() - started, 1)
    found = about | {"state": state, "reason": reason, "seconds": seconds, "cases": cases}
    return found | ({"output": output} if error else {})


def choose_environment(step: Step, mode: str) -> dict[str, str]:
    """Return the variables of a step's process; a rehearsal sees no GPU, and interprets what it does not compile."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if mode == "card":
        return environment
    return environment | {"CUDA_VISIBLE_DEVICES": ""} | ({"TRITON_INTERPRET": "1"} if step.interprets else {})


def call(command: Sequence[str], environment: Mapping[str, str], limit: float) -> tuple[str, list[str]]:
    """Run a command from the checkout.

    Returns:
        Why it did not come to its end, nothing if it did, and the last lines that it printed.
    """
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
        lines = output.read().strip().splitlines()[-SHOWN:]
    if status is None:
        return f"stopped after {limit:.0f} s", lines
    return f"exit status {status}: {lines[-1] if lines else 'no output'}" if status else "", lines


def judge(cases: Sequence[Case], error: str) -> tuple[str, str]:
    """Return a step's state and the reason in one line.

    Args:
        cases: that came to an end.
        error: why the process did not.
    """
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
    """Print a step's line, and those of its failed cases if there are several."""
    print(f"{step['state']}  {step['name']:10} {step['seconds']:6.1f} s  {step['reason']}", flush=True)
    failed = [case for case in step["cases"] if case["state"] == "FAIL"]
    for case in failed[1:]:
        print(f"      {case['name']}: {case['reason']}", flush=True)
