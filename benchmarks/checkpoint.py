"""A checkpoint of a model's full shape, in the official form: seconds and memory of loading it and of one image.

python -m benchmarks checkpoint [--model infinity_2b] [--folder /tmp] [--threads 2] [--load-only] [overrides]
Random numbers, of the transformer in bfloat16, are written to files like those of the Hub, and deleted in the end.
Each step is a process of its own, whose peak resident memory is printed, mapped pages of files included, imports not:
`write`; `first load` (hashes and converts the files) and `load`, in the dtypes of the files, as on the way to a GPU;
`image` (loads in float32, as a CPU computes, and draws one image). Flan-T5 is left out: features of prompts are drawn
by hash. Overrides change the model's settings (model.pixels=0.06M).
"""

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.support.arguments import OVERRIDES, Option
from benchmarks.support.build import build_model, prepare_method
from benchmarks.support.table import Table
from kvbench.core.devices import keep_freed_memory
from kvbench.engine.cache import KVCache
from kvbench.models.files.checkpoints import split_layers
from kvbench.models.files.parameters import fill_random, load_into
from kvbench.models.infinity.model import InfinityModel
from kvbench.models.noise import PromptNoise
from kvbench.models.parts.text import HashedText

GB = 1e9


class Measured(NamedTuple):
    """Seconds of a step, of the clock and of processors, and the most resident bytes; without its process's imports."""

    seconds: float
    processors: float
    peak: int


def choose_model(name: str, folder: Path, overrides: Sequence[str]) -> Any:
    """Build a model whose files lie in a folder.

    Raises:
        ValueError: the model reads prompts by a tokenizer, for which no random numbers can stand.
    """
    model = build_model(name, *overrides)
    if set(model.sources) - {"text"} != set(model._cleans) or ("text" in model.sources) != isinstance(
        model, InfinityModel
    ):
        raise ValueError(f"--model {name}: not of Infinity, VAR or LlamaGen's classes")
    sources = {part: model.sources[part] for part in model._cleans}
    places = {part: str(folder / (source.file or f"{part}.pth")) for part, source in sources.items()}
    model.sources = {part: type(one)(one.key, path=places[part]) for part, one in sources.items()}
    return model


def write(model: Any) -> None:
    """Write the checkpoint of every part: a torch file, or a folder of shards with their index."""
    for (part, source), module in zip(model.sources.items(), model._build(), strict=True):
        dtype = torch.bfloat16 if part == "transformer" else torch.float32
        fill_random(module, lambda _, tensor, dtype=dtype: tensor.to(dtype))
        state, path = module.state_dict(), Path(source.path)
        if path.suffix:
            torch.save(state, path)
        else:
            write_shards(path, state)


def write_shards(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Write a layer's tensors into one file each."""
    folder.mkdir()
    index: dict[str, str] = {}
    for number, group in enumerate(split_layers(state)):
        name = f"pytorch_model-{number:05}.bin"
        torch.save(dict(group), folder / name)
        index |= dict.fromkeys(group, name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))


def load(model: Any) -> None:
    """Load every part as its file has it, and read each number once."""

    def touch(_: str, tensor: Tensor) -> Tensor:
        tensor.sum()
        return tensor

    for (part, source), module in zip(model.sources.items(), model._build(), strict=True):
        load_into(module, source, model._cleans[part], touch)


def draw(model: Any) -> None:
    """Load the model and draw one image with the full cache."""
    if isinstance(model, InfinityModel):
        model._read_text = lambda device: (HashedText(model.transformer.text_width, device), "")  # type: ignore[method-assign]
    started = time.perf_counter(), time.process_time()
    model.load("cpu")
    seconds = time.perf_counter() - started[0], time.process_time() - started[1]
    print(f"  loaded in float32 in {seconds[0]:.1f} s ({seconds[1]:.1f} CPU s)", flush=True)
    cache = KVCache(model.spec, prepare_method(model.spec, 1, ["method=full"]), dtype=torch.float32)
    images = model.generate(["1"], cache, PromptNoise(0, range(1)))
    print(f"  one image of {images.shape[1]} x {images.shape[2]} pixels", flush=True)


def run_step(make: Callable[[], Any], step: Callable[[Any], None], threads: int) -> Measured:
    """Do a step on a new model in this process."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    model = make()
    before, clocks = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        (time.perf_counter, time.process_time),
    )
    started = [clock() for clock in clocks]
    with torch.inference_mode():
        step(model)
    seconds, processors = (clock() - start for clock, start in zip(clocks, started, strict=True))
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return Measured(seconds, processors, peak)


def measure(make: Callable[[], Any], step: Callable[[Any], None], threads: int) -> Measured:
    """Do a step in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(run_step, make, step, threads).result()


OPTIONS = {
    "model": "infinity_2b", "threads": 2,
    "folder": Option("/tmp", "where the checkpoint is written, with another copy of its size"),
    "load_only": Option(False, "draw no image"), **OVERRIDES,
}  # fmt: skip


def main(options: argparse.Namespace) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="kvbench-checkpoint-") as name:
        os.environ |= {"KVBENCH_WEIGHTS": f"{name}/converted", "KVBENCH_STAGE": ""}
        make = partial(choose_model, options.model, Path(name), options.overrides)
        parameters = make().parameters / GB
        written = measure(make, write, options.threads)
        size = sum(file.stat().st_size for file in Path(name).rglob("*") if file.is_file())
        print(f"{options.model}: {parameters:.2f} B parameters, files of {size / GB:.2f} GB")
        table = Table({"s": ".1f", "CPU s": ".1f", "peak GB": ".2f", "of the files": ".2f"}, width=12)
        steps = {"first load": load, "load": load} | ({} if options.load_only else {"image": draw})
        runs = ((label, measure(make, step, options.threads)) for label, step in steps.items())
        for label, found in chain([("write", written)], runs):
            table.add(label, found.seconds, found.processors, found.peak / GB, found.peak / size)
