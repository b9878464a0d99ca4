"""Time per image of every method, and of a plain loop that does what the official program does (`plain_loop.py`).

Same weights, same noise, same process, interleaved:
python benchmarks/engine.py [--methods heatkv,h2o] [--budget 0.1] [--batch 8] [--repeats 9] [--threads 2]
python benchmarks/engine.py --model infinity_2b --device cuda   (random weights)
python benchmarks/engine.py --methods full,heatkv --stored int8:channel,int4:codebooks   (each also in few bits)
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from build import CONF, built, composed
from plain_loop import PlainCache, plain_loop

import kvbench
from kvbench.core.budget import Budget
from kvbench.core.devices import if_it_fits, keep_freed_memory
from kvbench.core.storage import CODE_DTYPES, StorageConfig
from kvbench.engine.cache import KVCache
from kvbench.engine.coding.codebooks import Codebooks
from kvbench.engine.coding.formats import Packing
from kvbench.methods.base import Observer
from kvbench.models.base import Cache
from kvbench.models.infinity.model import InfinityModel
from kvbench.models.noise import PromptNoise
from kvbench.scenes.grammar import evaluation_prompts


def cache_of(name: str, model: InfinityModel, budget: str, device: str, stored: str | None = None) -> KVCache:
    """A cache with a method of `conf/method`; random numbers stand for calibrations, which cost no time.

    `stored` names a dtype of few bits and a file of `conf/storage`, as `int4:codebooks` does.
    """
    method = built(composed([f"model={model.name}", f"method={name}"])["method"])
    needs = method.needs()
    artifact = needs.make_stand_in(model.spec) if isinstance(needs, Observer) else None
    method.prepare(model.spec, Budget.parse(1 if name == "full" else budget, model.spec), artifact)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if stored is None:
        return KVCache(model.spec, method, dtype=dtype, device=device)
    name, _, choice = stored.partition(":")
    how = StorageConfig(**composed([f"storage={choice or 'channel'}"])["storage"])
    return KVCache(
        model.spec,
        method,
        dtype=dtype,
        device=device,
        packing=Packing(CODE_DTYPES[name], how, fp8=name == "fp8"),
        rotation=model.key_rotation(),
        books=Codebooks().make_stand_in(model.spec).tensors if how.calibrated else None,
    )


def timed(
    model: InfinityModel, prompts: Sequence[str], cache: Cache, clock: Callable[[], float]
) -> float | None:
    """Seconds of one batch, up to its images on the CPU; None when memory does not suffice."""
    started = clock()
    images = if_it_fits(lambda: model.generate(prompts, cache, PromptNoise(0, range(len(prompts)))))
    elapsed = clock() - started
    cache.reset(0)  # the plain one holds all keys until then
    return None if images is None else elapsed


def main() -> None:
    """Prints medians in milliseconds per image and ratios to the full cache."""
    every = ",".join(sorted(path.stem for path in CONF.glob("method/*.yaml")))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default=every)
    parser.add_argument("--model", default="infinity_tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", default="0.1")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--stored", default="", help="in few bits too: int4:channel,int2:codebooks")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--cpu-time", action="store_true", help="count processor time, where others use the machine"
    )
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    weights = "files" if options.model == "infinity_tiny" else "random"
    model = built(composed([f"model={options.model}", f"model.weights={weights}"])["model"])
    names = dict.fromkeys(["full", *options.methods.split(",")])
    caches = {name: cache_of(name, model, options.budget, options.device) for name in names}
    for stored in options.stored.split(",") if options.stored else ():
        for name in names:
            caches[f"{name}, {stored}"] = cache_of(name, model, options.budget, options.device, stored)
    model.load(options.device)
    pairs = {"plain loop": (plain_loop(model), PlainCache())} | {n: (model, c) for n, c in caches.items()}
    prompts = [str(line["prompt"]) for line in evaluation_prompts(options.batch)]
    seconds: dict[str, list[float]] = {name: [] for name in pairs}
    for repeat in range(options.repeats + 2):
        for name, (runner, cache) in list(pairs.items()):
            elapsed = timed(runner, prompts, cache, clock)
            if elapsed is None:
                del pairs[name]
            elif repeat >= 2:
                seconds[name].append(elapsed)
    base = statistics.median(seconds["full"] or [math.nan])
    lines = [
        f"kvbench {kvbench.__version__}, {model.name}, batch {options.batch}, "
        f"{options.threads} threads, {options.device}, weights: {weights}",
        f"budget {options.budget}; median of {options.repeats} after 2 warm-ups, interleaved",
    ]
    for name, values in seconds.items():
        if name not in pairs:
            lines.append(f"{name:28s} out of memory")
            continue
        median = statistics.median(values)
        lines.append(f"{name:28s} {1e3 * median / options.batch:8.2f} ms/image   {median / base:.3f} x full")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
