"""Time per image of every method, and of a plain loop that follows Infinity's official code (`plain_loop.py`).

All runs share weights, noise and process, and take turns:
python -m benchmarks engine [--methods heatkv,h2o] [--budget 0.1] [--batch 8] [--repeats 9] [--threads 2]
python -m benchmarks engine --model infinity_2b --device cuda   (random weights)
python -m benchmarks engine --methods full,heatkv --stored int8:channel,int4:codebooks   (each also in low-bit storage)
"""

import argparse
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

import kvbench
from benchmarks.support.arguments import Option
from benchmarks.support.build import built, composed, list_choices, open_cache, prepare_method
from benchmarks.support.plain_loop import PlainCache, plain_loop
from benchmarks.support.table import Table
from benchmarks.support.timing import choose_clock, take_turns
from kvbench.core.devices import run_or_none_if_oom
from kvbench.core.gpus import resolve_noise
from kvbench.engine.cache import KVCache
from kvbench.models.base import Cache, Model
from kvbench.models.infinity.model import InfinityModel
from kvbench.models.noise import make_noise


def cache_of(name: str, model: Model, budget: str, device: str, stored: str | None = None) -> KVCache:
    """Open a cache with a method of `conf/method` and a random calibration; `stored` as in `open_cache`."""
    method = prepare_method(model.spec, budget, [f"model={model.name}", f"method={name}"])
    return open_cache(model, method, device, stored)


def open_caches(model: Model, options: argparse.Namespace) -> dict[str, KVCache]:
    """Open the caches of the named methods by their labels, or of all methods that fit; print why others do not.

    Raises:
        ValueError: a named method does not fit the model, the budget or the storage.
    """
    caches = {}
    names = dict.fromkeys(
        ["full", *(options.methods.split(",") if options.methods else list_choices("method"))]
    )
    for stored in (None, *filter(None, options.stored.split(","))):
        for name in names:
            try:
                cache = cache_of(name, model, options.budget, options.device, stored)
            except ValueError as error:
                if options.methods:
                    raise
                print(f"{name} is left out: {error}")
            else:
                caches[f"{name}, {stored}" if stored else name] = cache
    return caches


def generate(model: Model, cache: Cache, prompts: Sequence[str]) -> Tensor:
    """Generate a batch of images with the device's default noise, then empty the cache, which may hold all keys."""
    try:
        kind = resolve_noise("auto", str(model._device))
        return model.generate(prompts, cache, make_noise(kind, 0, range(len(prompts)), model._device))
    finally:
        cache.reset(0)


OPTIONS = {
    "methods": Option("", "methods of conf/method, separated by commas; by default all that fit the model"),
    "model": "infinity_tiny", "device": "auto", "budget": "0.1", "batch": 8, "repeats": 9, "threads": None,
    "cpu_time": False,
    "stored": Option("", "also measure low-bit storage: int4:channel,int2:codebooks"),
}  # fmt: skip


def main(options: argparse.Namespace) -> None:
    """Print medians in milliseconds per image and ratios to the full cache."""
    values = composed([f"model={options.model}", "model.weights=random"])
    shipped = all(str(source["path"]).startswith("pkg://") for source in values["model"]["sources"].values())
    weights = "files" if shipped else "random"
    model = built(values["model"] | {"weights": weights})
    prompts = [prompt.text for prompt in built(values["prompts"] | {"count": options.batch}).load()]
    caches = open_caches(model, options)
    model.load(options.device)
    pairs: dict[str, tuple[Model, Cache]] = {name: (model, cache) for name, cache in caches.items()}
    if isinstance(model, InfinityModel):
        pairs = {"plain loop": (plain_loop(model), PlainCache()), **pairs}
    runs = {name: partial(generate, *pair, prompts) for name, pair in pairs.items()}
    fitting = {name: run for name, run in runs.items() if run_or_none_if_oom(run) is not None}
    times = take_turns(fitting, options.repeats, choose_clock(options.cpu_time, options.device))
    print(
        f"kvbench {kvbench.__version__}, {model.name}, batch {options.batch}, "
        f"{torch.get_num_threads()} threads, {options.device}, weights: {weights}"
    )
    print(f"budget {options.budget}; median of {options.repeats} after 2 warm-ups, interleaved")
    table = Table({"ms/image": ".2f", "x full": ".3f", "its 95 % interval": ""}, width=28)
    for name in runs:
        if name in times:
            ratio = times[name].compare(times["full"]) if "full" in times else ()
            table.add(name, 1e3 * times[name].seconds / options.batch, *ratio)
        else:
            print(f"{name:28s} out of memory")
