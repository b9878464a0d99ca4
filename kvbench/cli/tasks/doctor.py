"""`task=doctor`: what this machine and this installation can do, and what to do about the rest."""

import importlib.metadata
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from kvbench.cli.tasks.check import Finding
from kvbench.core.devices import count_gpus
from kvbench.core.files import count_free_bytes
from kvbench.eval.files.weights import FETCH
from kvbench.eval.protocol.base import Evaluator, find_missing
from kvbench.runs.record.provenance import find_version

GIB = 2**30
LIBRARIES = ("kvbench", "torch", "triton", "hydra-core", "numpy")
NAME = re.compile(r"[\w.-]+")
"""Name of a distribution at the beginning of a requirement."""
EXTRA = re.compile(r"extra == ['\"](\w+)['\"]")


def examine(evaluators: Mapping[str, Evaluator], runs_dir: Path) -> Iterator[Finding]:
    """Yield what is found of versions, GPUs, extras, metrics and disk, and a command to go on with.

    Args:
        evaluators: every metric by its name in `conf/eval`.
        runs_dir: where runs will be.
    """
    versions = [f"{name} {find_version(name) or 'not installed'}" for name in LIBRARIES]
    yield Finding("versions", "ok", f"Python {platform.python_version()}, {', '.join(versions)}")
    gpus = list(list_gpus())
    yield from gpus
    yield from _find_extras()
    yield from _list_metrics(evaluators)
    yield Finding("disk", "ok", f"{count_free_bytes(runs_dir) / GIB:.0f} GiB free for runs_dir={runs_dir}")
    device = " device=cuda" if gpus[0].state == "ok" else ""
    yield Finding("next", "ok", f"python run.py method=heatkv budget=0.04{device}")


def list_gpus() -> Iterator[Finding]:
    """Yield each GPU's name, compute capability, memory, and shared memory of a block; or why there is none."""
    if not (count := count_gpus()):
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        yield Finding(
            "GPU", "note", f"none: torch is {built}, and finds no card and driver; device=cpu works"
        )
    for number in range(count):
        about = torch.cuda.get_device_properties(number)
        shared = about.shared_memory_per_block_optin / 1024
        memory = f"{about.total_memory / GIB:.0f} GiB, {shared:.0f} KiB of shared memory a block"
        yield Finding(f"cuda:{number}", "ok", f"{about.name}, sm_{about.major}{about.minor}, {memory}")


def _find_extras() -> Iterator[Finding]:
    """Yield the extras that lack a package; of a checkout that is run without an installation nothing is known."""
    if find_version("kvbench") is None:
        yield Finding("extras", "note", "kvbench runs from its checkout: pip install -e .")
        return
    lacking = {extra: names for extra, names in list_extras().items() if names}
    for extra, names in lacking.items():
        yield Finding(f"extra {extra}", "note", f"{', '.join(names)} missing: pip install 'kvbench[{extra}]'")
    if not lacking:
        yield Finding("extras", "ok", "all are installed")


def list_extras() -> dict[str, list[str]]:
    """Return what is not installed of each extra of kvbench but `dev`, by the extra's name."""
    lacking: dict[str, list[str]] = {}
    for line in importlib.metadata.requires("kvbench") or ():
        name, extra = NAME.match(line), EXTRA.search(line)
        if name and extra and extra[1] != "dev":
            lacking.setdefault(extra[1], [])
            if find_version(name[0]) is None:
                lacking[extra[1]].append(name[0])
    return lacking


def _list_metrics(evaluators: Mapping[str, Evaluator]) -> Iterator[Finding]:
    """Yield the metrics that can be computed here, and what others lack; those that one command helps together."""
    lacking = {name: find_missing(evaluator) for name, evaluator in evaluators.items()}
    yield Finding("metrics", "ok", ", ".join(name for name, reasons in lacking.items() if not reasons))
    fetched = [name for name, reasons in lacking.items() if any(FETCH in reason for reason in reasons)]
    if fetched:
        yield Finding("metrics", "note", f"{', '.join(fetched)}: weights missing; get them with: {FETCH}")
    for name, reasons in lacking.items():
        if others := [reason for reason in reasons if FETCH not in reason]:
            yield Finding(f"eval={name}", "note", "; ".join(others))
