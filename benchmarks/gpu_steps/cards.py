"""Step for two GPUs: equal results on both, two processes that share a run, and a model split over two processes."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_steps.base import Case, Failed, Figures, Machine, Skipped, call_python
from benchmarks.gpu_steps.generations import MODELS, are_equal, load
from kvbench.core.devices import use_device
from kvbench.core.files import hash_path

SHARED = ("method=heatkv", "budget=0.1", "prompts.count=8", "batch_size=2", "eval=none")
"""Overrides of the run that two processes share."""
SPLIT = (
    "model=reasoner_tiny", "prompts=math_tiny", "prompts.count=2", "model.max_tokens=60", "eval=none", "method=full",
)  # fmt: skip
"""Overrides of the run whose model is split over two processes."""


def list_cases(machine: Machine) -> Iterator[Case]:
    """Yield the cases; a rehearsal uses the CPU twice."""
    cases = {
        "cuda:1 equals cuda:0": compare_cards, "two processes share a run": share_run,
        "two processes hold a model": hold_model,
    }  # fmt: skip
    for name, check in list(cases.items())[: machine.choose(None, None, 1)]:
        yield Case(name, partial(on_two_cards, machine, check))


def on_two_cards(machine: Machine, check: "partial[Figures]") -> Figures:
    """Run a check on two GPUs; skip the case if there is only one."""
    if machine.cards < 2:
        raise Skipped("there is only one GPU, and this step needs two")
    return check(machine)


def compare_cards(machine: Machine) -> Figures:
    """Generate on both GPUs; every byte must be equal."""
    dtype, batches = machine.choose(torch.bfloat16, torch.float32), []
    for device in machine.choose(("cuda:0", "cuda:1"), ("cpu", "cpu")):
        use_device(device)
        tiny = load(["model=infinity_tiny", *MODELS["infinity_tiny"]], 2, device, dtype)
        batches.append(tiny.draw(tiny.open_cache(tiny.prepare(("method=heatkv",), "0.5"))))
    use_device(machine.device)
    if not are_equal(*batches):
        raise Failed("images differ; the two GPUs may be of different kinds")
    return {"images": len(batches[0])}


def share_run(machine: Machine) -> Figures:
    """Share a run between two processes, each on its GPU, and compare its images with a single process's."""

    def share(command: list[str]) -> None:
        shards = [[*command, f"shard.index={index}", "shard.count=2"] for index in range(2)]
        call_python(*shards, cards=machine.choose(("0", "1"), ("", "")))

    alone, together = run_twice(machine, SHARED, share, hash_images)
    if alone != together:
        raise Failed("two processes generate other images than one process")
    return {"images": len(alone)}


def hold_model(machine: Machine) -> Figures:
    """Split a language model over two processes; another order of sums may change some texts, not all."""

    def split(command: list[str]) -> None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        call_python([*torchrun, *command, "model.tensor_parallel=2"])

    texts = run_twice(machine, SPLIT, split, read_texts)
    same = sum(one == other for one, other in zip(*texts, strict=True))
    if not same:
        raise Failed("no text of two processes equals the text of one")
    return {"texts": len(texts[0]), "same": same}


def run_twice(
    machine: Machine, settings: Sequence[str], call: Callable[[list[str]], None], read: Callable[[Path], Any]
) -> tuple[Any, Any]:
    """Run a command in one process and by `call` in two; return what `read` gives for the runs folder of each."""
    with tempfile.TemporaryDirectory() as folder:
        alone, together = Path(folder, "alone"), Path(folder, "together")
        command = ["run.py", f"device={machine.choose('cuda', 'cpu')}", *settings]
        call_python([*command, f"runs_dir={alone}"])
        call([*command, f"runs_dir={together}"])
        return read(alone), read(together)


def hash_images(runs: Path) -> dict[str, str]:
    """Return the images' digests by file name, of the only HeatKV run of a folder."""
    (folder,) = runs.glob("*/heatkv-*/images")
    return {file.name: hash_path(file) for file in sorted(folder.iterdir())}


def read_texts(runs: Path) -> list[str]:
    """Return the texts of the only run of a folder."""
    (folder,) = runs.glob("*/*/texts")
    return [file.read_text() for file in sorted(folder.iterdir())]
