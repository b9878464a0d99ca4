"""Cases of a step of the check, their outcomes, and the machine that they run on."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import create_autospec, patch

import torch

from benchmarks.support.cuda_branches import on_cuda_branches
from benchmarks.support.tape import Tape
from kvbench.core.devices import use_device
from kvbench.core.files import write_whole
from kvbench.core.graphs import CudaGraphs, Record
from kvbench.core.segments import ModelSpec

Figures = Mapping[str, Any]
"""Measurements of a case, JSON values by name."""
State = Literal["PASS", "FAIL", "SKIP"]
MODES = ("card", "interpreted", "smallest")
"""`card`: on a GPU. `interpreted`: a rehearsal on a CPU at small shapes. `smallest`: at fewer of them, for tests."""


class Failed(Exception):
    """A case went wrong; the message has the numbers."""


class Skipped(Exception):
    """A case cannot run here; the message says why."""


@dataclass(frozen=True)
class Case:
    """One part of a step.

    Attributes:
        name: unique in its step.
        run: does it, and returns what it measured; raises `Failed` or `Skipped`.
    """

    name: str
    run: Callable[[], Figures]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case.

    Attributes:
        name: of the case.
        state: whether it passed.
        reason: why it did not; empty if it did.
        seconds: it took.
        figures: what it measured.
    """

    name: str
    state: State
    reason: str
    seconds: float
    figures: Figures


def run_cases(cases: Iterator[Case], file: Path) -> list[Outcome]:
    """Run cases one after the other, whatever becomes of each, and write all outcomes so far after each of them."""
    found: list[Outcome] = []
    for case in cases:
        started = time.perf_counter()
        state, reason, figures = _try(case)
        found.append(Outcome(case.name, state, reason, round(time.perf_counter() - started, 2), figures))
        write_whole(file, json.dumps([asdict(outcome) for outcome in found]))
    return found


def _try(case: Case) -> tuple[State, str, Figures]:
    try:
        return "PASS", "", case.run()
    except Skipped as reason:
        return "SKIP", str(reason), {}
    except Failed as reason:
        return "FAIL", str(reason), {}
    except Exception as error:  # an error of a kernel is a finding too, and the next case may work
        lines = str(error).strip().splitlines() or [""]
        return "FAIL", f"{type(error).__name__}: {lines[0]}", {}


@dataclass(frozen=True)
class Machine:
    """Device of a step: a GPU, or a CPU that takes a GPU's branches.

    Attributes:
        mode: one of `MODES`.
    """

    mode: str

    @property
    def interpreted(self) -> bool:
        """Whether this is a rehearsal."""
        return self.mode != "card"

    @property
    def device(self) -> str:
        """Device of tensors."""
        return "cpu" if self.interpreted else "cuda:0"

    @property
    def half(self) -> torch.dtype:
        """16 bits: interpreted, bfloat16 can be stored but neither multiplied nor rounded to."""
        return torch.float16 if self.interpreted else torch.bfloat16

    @property
    def cards(self) -> int:
        """GPUs; a rehearsal has two."""
        return 2 if self.interpreted else torch.cuda.device_count()

    def choose(self, card: Any, interpreted: Any, smallest: Any = None) -> Any:
        """Return the value for this mode; the smallest is the interpreted one unless it is given."""
        if self.mode == "smallest" and smallest is not None:
            return smallest
        return interpreted if self.interpreted else card

    def branches(self) -> AbstractContextManager[object]:
        """Return the context in which tensors go the ways that they go on a GPU."""
        return on_cuda_branches() if self.interpreted else nullcontext()

    def make_record(self, spec: ModelSpec) -> Record | None:
        """Return what records a model's steps; a rehearsal's can repeat whole segments, not steps of one token."""
        if not self.interpreted:
            return CudaGraphs()
        return None if spec.family == "next-token" else Tape()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Make the GPU the current one; in a rehearsal, answer questions to CUDA that have the right arguments."""
        if not self.interpreted:
            use_device(self.device)
            yield
            return
        answers = {
            "synchronize": None, "empty_cache": None, "reset_peak_memory_stats": None, "memory_allocated": 0,
            "max_memory_allocated": 0, "max_memory_reserved": 0, "set_per_process_memory_fraction": None,
        }  # fmt: skip
        with ExitStack() as stack:
            for name, answer in answers.items():
                fake = create_autospec(getattr(torch.cuda, name), return_value=answer)
                stack.enter_context(patch.object(torch.cuda, name, fake))
            yield
