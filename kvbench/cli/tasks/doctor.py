"""`task=doctor`: what this machine and this installation can do, with remedies for what is missing."""

import platform
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from omegaconf import DictConfig

from kvbench.cli.config.compose import compose_metrics
from kvbench.cli.config.instantiate import instantiate
from kvbench.cli.config.search_path import leaving_out
from kvbench.cli.tasks.check import Finding, show_findings
from kvbench.core.devices import count_gpus
from kvbench.core.extras import find_version, list_extras
from kvbench.core.files import count_free_bytes
from kvbench.core.settings import Settings
from kvbench.eval.files.weights import FETCH_COMMAND
from kvbench.eval.protocol.base import Evaluator, find_missing

GIB = 2**30
LIBRARIES = ("kvbench", "torch", "triton", "hydra-core", "numpy")


def doctor(_: DictConfig, settings: Settings) -> None:
    """Run `task=doctor`: describe this machine and this installation; nothing is loaded."""
    evaluators = {}
    for name, node in compose_metrics().items():
        with leaving_out(f"eval.{name}"):
            evaluators[name] = instantiate(node)
    show_findings(list(examine(evaluators, settings.runs_dir)))


def examine(evaluators: Mapping[str, Evaluator], runs_dir: Path) -> Iterator[Finding]:
    """Yield findings about versions, GPUs, extras, metrics by name and disk, and a first command."""
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
    """Yield the name, compute capability, memory and shared memory per block of each GPU, or why there is none."""
    if not (count := count_gpus()):
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        yield Finding("GPU", "note", f"none: torch is {built}, and finds no GPU and driver; device=cpu works")
    for number in range(count):
        about = torch.cuda.get_device_properties(number)
        shared = about.shared_memory_per_block_optin / 1024
        memory = f"{about.total_memory / GIB:.0f} GiB, {shared:.0f} KiB of shared memory a block"
        yield Finding(f"cuda:{number}", "ok", f"{about.name}, sm_{about.major}{about.minor}, {memory}")


def _find_extras() -> Iterator[Finding]:
    """Yield the extras with missing packages, or a note if kvbench is not installed."""
    if find_version("kvbench") is None:
        yield Finding("extras", "note", "kvbench runs from its checkout: pip install -e .")
        return
    every = {
        extra: [one for one in names if find_version(one) is None] for extra, names in list_extras().items()
    }
    missing = {extra: names for extra, names in every.items() if names}
    for extra, names in missing.items():
        yield Finding(f"extra {extra}", "note", f"{', '.join(names)} missing: pip install 'kvbench[{extra}]'")
    if not missing:
        yield Finding("extras", "ok", "all are installed")


def _list_metrics(evaluators: Mapping[str, Evaluator]) -> Iterator[Finding]:
    """Yield the metrics that can be computed here, and what other metrics need, grouped by need."""
    missing = {name: find_missing(evaluator) for name, evaluator in evaluators.items()}
    yield Finding("metrics", "ok", ", ".join(name for name, reasons in missing.items() if not reasons))
    fetched = [
        name for name, reasons in missing.items() if any(FETCH_COMMAND in reason for reason in reasons)
    ]
    if fetched:
        yield Finding(
            "metrics", "note", f"{', '.join(fetched)}: weights missing; get them with: {FETCH_COMMAND}"
        )
    others: dict[str, list[str]] = {}
    for name, reasons in missing.items():
        if reason := "; ".join(one for one in reasons if FETCH_COMMAND not in one):
            others.setdefault(reason, []).append(name)
    for reason, names in others.items():
        yield Finding("metrics", "note", f"{', '.join(names)}: {reason}")
