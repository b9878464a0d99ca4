"""Step for two GPUs: equal results on both, two processes that share a run, and a model split over two processes."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_steps.base import Case, Failed, Figures, Machine, Skipped
from benchmarks.gpu_steps.generations import MODELS, are_equal, load
from benchmarks.support.build import ROOT
from kvbench.core.devices import use_device
from kvbench.core.files import hash_path

SHARED = ("method=heatkv", "budget=0.1", "prompts.count=8", "batch_size=2", "eval=none")
"""Overrides of the run that two processes share."""
SPLIT = (
    "model=reasoner_tiny", "prompts=math_tiny", "prompts.count=2", "model.max_tokens=60", "eval=none", "method=full",
)  # fmt: skip
"""A run with a model that is split over two processes."""


def list_cases(machine: Machine) -> Iterator[Case]:
    """Yield the cases; a rehearsal uses the CPU twice."""
    cases = {
        "cuda:1 equals cuda:0": compare_cards, "two processes share a run": share_run,
        "two processes hold a model": hold_model,
    }  # fmt: skip
    for name, check in list(cases.items())[: machine.choose(None, None, 1)]:
        yield Case(name, partial(on_two_cards, machine, check))


def on_two_cards(machine: Machine, check: "partial[Figures]") -> Figures:
    """Run a check on two cards; skip it if there is only one."""
    if machine.cards < 2:
        raise Skipped("there is only one GPU, and this step needs two")
    return check(machine)


def compare_cards(machine: Machine) -> Figures:
    """Generate on both cards; every byte must be equal."""
    dtype, batches = machine.choose(torch.bfloat16, torch.float32), []
    for device in machine.choose(("cuda:0", "cuda:1"), ("cpu", "cpu")):
        use_device(device)
        one = load(["model=infinity_tiny", *MODELS["infinity_tiny"]], 2, device, dtype)
        batches.append(one.draw(one.open_cache(one.prepare(("method=heatkv",), "0.5"))))
    use_device(machine.device)
    if not are_equal(*batches):
        raise Failed("images differ; the two cards may be of different kinds")
    return {"images": len(batches[0])}


def share_run(machine: Machine) -> Figures:
    """Share a run between two processes, each on its card, and compare its images with a single process's."""

    def share(words: list[str]) -> None:
        shards = [[*words, f"shard.index={number}", "shard.count=2"] for number in range(2)]
        call_all(shards, cards=machine.choose(("0", "1"), ("", "")))

    alone, together = run_twice(machine, SHARED, share, hash_images)
    if alone != together:
        raise Failed("two processes generate other images than one process")
    return {"images": len(alone)}


def hold_model(machine: Machine) -> Figures:
    """Split a language model over two processes; another order of sums may change some texts, but not all."""

    def split(words: list[str]) -> None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        call_all([[words[0], *torchrun, *words[1:], "model.tensor_parallel=2"]])

    texts = run_twice(machine, SPLIT, split, read_texts)
    same = sum(one == other for one, other in zip(*texts, strict=True))
    if not same:
        raise Failed("no text of two processes equals the text of one")
    return {"texts": len(texts[0]), "same": same}


def run_twice(
    machine: Machine, settings: Sequence[str], call: Callable[[list[str]], None], read: Callable[[Path], Any]
) -> tuple[Any, Any]:
    """Run a command in one process and by `call` in two; return what `read` finds in the folders of both."""
    with tempfile.TemporaryDirectory() as folder:
        alone, together = Path(folder, "alone"), Path(folder, "together")
        words = [sys.executable, "run.py", f"device={machine.choose('cuda', 'cpu')}", *settings]
        call_all([[*words, f"runs_dir={alone}"]])
        call([*words, f"runs_dir={together}"])
        return read(alone), read(together)


def call_all(commands: Sequence[list[str]], cards: Sequence[str] | None = None) -> None:
    """Run commands in parallel, each on its card if `cards` is set; one that fails raises `Failed`."""
    processes = []
    for number, words in enumerate(commands):
        own = {} if cards is None else {"CUDA_VISIBLE_DEVICES": cards[number]}
        process = subprocess.Popen(
            words, cwd=ROOT, env=os.environ | own, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        processes.append(process)
    outputs = [process.communicate()[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode:
            raise Failed((output.strip().splitlines() or ["no output"])[-1])


def hash_images(runs: Path) -> dict[str, str]:
    """Return the digests of the images of the run by HeatKV in a folder."""
    (folder,) = runs.glob("*/heatkv-*/images")
    return {file.name: hash_path(file) for file in sorted(folder.iterdir())}


def read_texts(runs: Path) -> list[str]:
    """Return the texts of the only run of a folder."""
    (folder,) = runs.glob("*/*/texts")
    return [file.read_text() for file in sorted(folder.iterdir())]
