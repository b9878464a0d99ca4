"""Cases of a step of the check, their outcomes, and the machine that runs them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from subprocess import PIPE
from typing import Any, Literal
from unittest.mock import patch

import torch

from benchmarks.support.build import ROOT
from benchmarks.support.cuda_branches import on_cuda_branches
from benchmarks.support.tape import Tape
from kvbench.core.devices import use_device
from kvbench.core.files import write_whole
from kvbench.core.segments import ModelSpec
from kvbench.engine.recording.graphs import CudaGraphs, GraphRecorder

Figures = Mapping[str, Any]
"""Measurements of a case: JSON values by name."""
State = Literal["PASS", "FAIL", "SKIP"]
MODES = ("card", "interpreted", "smallest")
"""`card`: on a GPU. `interpreted`: rehearsal on a CPU with small shapes. `smallest`: with fewer shapes, for tests."""


class Failed(Exception):
    """A case failed; the message states the measured and expected values."""


class Skipped(Exception):
    """A case cannot run here; the message states the reason."""


@dataclass(frozen=True)
class Case:
    """One part of a step; `run` returns measurements or raises `Failed` or `Skipped`."""

    name: str
    run: Callable[[], Figures]


@dataclass(frozen=True)
class Outcome:
    """Outcome of the case `name`; `reason` says why it did not pass."""

    name: str
    state: State
    reason: str
    seconds: float
    figures: Figures


def run_cases(cases: Iterator[Case], file: Path) -> list[Outcome]:
    """Run every case, even after failures, and return the outcomes; `file` holds those so far as JSON."""
    outcomes: list[Outcome] = []
    for case in cases:
        started = time.perf_counter()
        state, reason, figures = _try(case)
        outcomes.append(Outcome(case.name, state, reason, round(time.perf_counter() - started, 2), figures))
        write_whole(file, json.dumps([asdict(outcome) for outcome in outcomes]))
    return outcomes


def _try(case: Case) -> tuple[State, str, Figures]:
    try:
        return "PASS", "", case.run()
    except Skipped as reason:
        return "SKIP", str(reason), {}
    except Failed as reason:
        return "FAIL", str(reason), {}
    except Exception as error:  # an error of a kernel is a result too, and the next case may pass
        lines = str(error).strip().splitlines() or [""]
        return "FAIL", f"{type(error).__name__}: {lines[0]}", {}


@dataclass(frozen=True)
class Machine:
    """Device of a step: a GPU, or a CPU that takes a GPU's branches. `mode` is one of `MODES`."""

    mode: str

    @property
    def interpreted(self) -> bool:
        """Whether this is a rehearsal on a CPU, in Triton's interpreter."""
        return self.mode != "card"

    @property
    def device(self) -> str:
        """Device of tensors: `cuda:0`, or `cpu` in a rehearsal."""
        return "cpu" if self.interpreted else "cuda:0"

    @property
    def half(self) -> torch.dtype:
        """16-bit dtype; the interpreter stores bfloat16 but cannot multiply or round to it."""
        return torch.float16 if self.interpreted else torch.bfloat16

    @property
    def cards(self) -> int:
        """Number of GPUs; a rehearsal simulates two."""
        return 2 if self.interpreted else torch.cuda.device_count()

    def choose(self, card: Any, interpreted: Any, smallest: Any = None) -> Any:
        """Return the value for this mode; `smallest` defaults to `interpreted`."""
        if self.mode == "smallest" and smallest is not None:
            return smallest
        return interpreted if self.interpreted else card

    def branches(self) -> AbstractContextManager[object]:
        """Return a context in which code takes its GPU branches."""
        return on_cuda_branches() if self.interpreted else nullcontext()

    def make_record(self, spec: ModelSpec) -> GraphRecorder | None:
        """Return the recorder of a model's steps; a rehearsal records whole segments, not one-token steps."""
        if not self.interpreted:
            return CudaGraphs()
        return None if spec.family == "next-token" else Tape()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Make the GPU the current device; a rehearsal replaces functions of `torch.cuda` by autospecs."""
        if not self.interpreted:
            use_device(self.device)
            yield
            return
        replaced = (
            "synchronize", "empty_cache", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated",
            "max_memory_reserved", "set_per_process_memory_fraction",
        )  # fmt: skip
        with ExitStack() as stack:
            for name in replaced:
                stack.enter_context(patch.object(torch.cuda, name, autospec=True, return_value=0))
            yield


def call_python(*commands: Sequence[str], cards: Sequence[str] = ()) -> list[str]:
    """Run Python in the checkout with each command's arguments in parallel; return what each printed.

    Each process sees only its GPU of `cards`, if there are any. If one fails, raise `Failed` with stderr's last line.
    """
    processes = []
    for args, card in zip_longest(commands, cards):
        gpu = {} if card is None else {"CUDA_VISIBLE_DEVICES": card}
        process = subprocess.Popen(
            [sys.executable, *args], cwd=ROOT, env=os.environ | gpu, text=True, stdout=PIPE, stderr=PIPE
        )
        processes.append(process)
    outputs = [process.communicate() for process in processes]
    for args, process, (_, errors) in zip(commands, processes, outputs, strict=True):
        if process.returncode:
            raise Failed((errors.strip().splitlines() or [f"{' '.join(args)} failed"])[-1])
    return [printed for printed, _ in outputs]
