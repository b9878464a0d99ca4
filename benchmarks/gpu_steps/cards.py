"""Two GPUs: the second computes what the first does, two processes share a run, and two hold one model together."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu_steps.base import Case, Failed, Figures, Machine, Skipped
from benchmarks.gpu_steps.generations import MODELS, are_equal, load
from benchmarks.support.build import ROOT
from kvbench.core.devices import use_device
from kvbench.core.files import hash_path

SHARED = ("method=heatkv", "budget=0.1", "prompts.count=8", "batch_size=2", "eval=none")
"""A run that two processes share."""
SPLIT = (
    "model=reasoner_tiny", "prompts=math_tiny", "prompts.count=2", "model.max_tokens=60", "eval=none", "method=full",
)  # fmt: skip
"""A run whose model two processes hold together."""


def list_cases(machine: Machine) -> Iterator[Case]:
    """Yield the cases; a rehearsal's cards are the CPU twice."""
    cases = {
        "cuda:1 equals cuda:0": compare_cards, "two processes share a run": share_run,
        "two processes hold a model": hold_model,
    }  # fmt: skip
    for name, check in list(cases.items())[: machine.choose(None, None, 1)]:
        yield Case(name, partial(on_two_cards, machine, check))


def on_two_cards(machine: Machine, check: "partial[Figures]") -> Figures:
    """Run a check where there are two cards.

    Raises:
        Skipped: there is one.
    """
    if machine.cards < 2:
        raise Skipped("there is one GPU, this needs two")
    return check(machine)


def compare_cards(machine: Machine) -> Figures:
    """Generate on both cards.

    Raises:
        Failed: a byte differs.
    """
    dtype, made = machine.choose(torch.bfloat16, torch.float32), []
    for device in machine.choose(("cuda:0", "cuda:1"), ("cpu", "cpu")):
        use_device(device)
        one = load(["model=infinity_tiny", *MODELS["infinity_tiny"]], 2, device, dtype)
        made.append(one.draw(one.open_cache(one.prepare(("method=heatkv",), "0.5"), dtype)))
    use_device(machine.device)
    if not are_equal(*made):
        raise Failed("images differ; the two cards may be of different kinds")
    return {"images": len(made[0])}


def share_run(machine: Machine) -> Figures:
    """Have two processes, each on its card, share a run, and compare its images with those of one process.

    Raises:
        Failed: a command fails, or a byte differs.
    """
    device = machine.choose("cuda", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        alone, together = Path(folder, "alone"), Path(folder, "together")
        call_all([run_words(device, alone, *SHARED)])
        shards = [
            run_words(device, together, *SHARED, f"shard.index={number}", "shard.count=2")
            for number in range(2)
        ]
        call_all(shards, cards=machine.choose(("0", "1"), ("", "")))
        found = [hash_samples(runs, "heatkv-*/images") for runs in (alone, together)]
    if found[0] != found[1]:
        raise Failed("images of two processes are not those of one")
    return {"images": len(found[0])}


def hold_model(machine: Machine) -> Figures:
    """Have two processes hold a language model together, and compare its texts with those of one process.

    Raises:
        Failed: a command fails, or no text is the same: sums in another order may change some.
    """
    device = machine.choose("cuda", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        alone, together = Path(folder, "alone"), Path(folder, "together")
        call_all([run_words(device, alone, *SPLIT)])
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        words = run_words(device, together, *SPLIT, "model.tensor_parallel=2")
        call_all([[words[0], *torchrun, *words[1:]]])
        texts = [read_texts(runs) for runs in (alone, together)]
    same = sum(one == other for one, other in zip(*texts, strict=True))
    if not same:
        raise Failed("no text of two processes is that of one")
    return {"texts": len(texts[0]), "same": same}


def run_words(device: str, runs: Path, *overrides: str) -> list[str]:
    """Return the command of a run that writes into a folder."""
    return [sys.executable, "run.py", f"device={device}", f"runs_dir={runs}", *overrides]


def call_all(commands: Sequence[list[str]], cards: Sequence[str] | None = None) -> None:
    """Run commands side by side, each on its card if they are given.

    Raises:
        Failed: one failed; the message is the last line that it wrote.
    """
    environments = [
        os.environ | ({} if cards is None else {"CUDA_VISIBLE_DEVICES": card})
        for card in cards or [""] * len(commands)
    ]
    started = [
        subprocess.Popen(
            words, cwd=ROOT, env=one, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for words, one in zip(commands, environments, strict=True)
    ]
    outputs = [process.communicate()[0] for process in started]
    for process, output in zip(started, outputs, strict=True):
        if process.returncode:
            raise Failed((output.strip().splitlines() or ["no output"])[-1])


def hash_samples(runs: Path, pattern: str) -> dict[str, str]:
    """Return the digests of the files of the folder under `runs/<model>` that a pattern finds."""
    (folder,) = runs.glob(f"*/{pattern}")
    return {file.name: hash_path(file) for file in sorted(folder.iterdir())}


def read_texts(runs: Path) -> list[str]:
    """Return the texts of the only run of a folder."""
    (folder,) = runs.glob("*/*/texts")
    return [file.read_text() for file in sorted(folder.iterdir())]
