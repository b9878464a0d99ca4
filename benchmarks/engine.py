"""Time per image of every method, and of a plain loop that does what the official program does (`plain_loop.py`).

Same weights, same noise, same process, interleaved:
python benchmarks/engine.py [--methods heatkv,h2o] [--budget 0.1] [--batch 8] [--repeats 9] [--threads 2]
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from plain_loop import PlainCache, plain_loop

import kvbench
from kvbench import conf
from kvbench.budget import Budget
from kvbench.cache import KVCache
from kvbench.methods.base import Artifact, Observer
from kvbench.models.base import Cache
from kvbench.models.pipeline import InfinityModel
from kvbench.models.sampling import PromptNoise
from kvbench.scenes.grammar import evaluation_prompts


def cache_of(name: str, model: InfinityModel, budget: str) -> KVCache:
    """A cache with a method of `conf/method`; random numbers stand for its calibration, which costs no time."""
    method = instantiate(compose("config", overrides=[f"method={name}"]).method)
    needs, artifact = method.needs(), None
    if isinstance(needs, Observer):
        generator = torch.Generator().manual_seed(0)
        values = torch.rand(needs.shape(model.spec), generator=generator, dtype=torch.float64)
        artifact = Artifact(needs.kind, {needs.tensor: values})
    method.prepare(model.spec, Budget.parse(1 if name == "full" else budget, model.spec), artifact)
    return KVCache(model.spec, method, dtype=torch.float32)


def timed(model: InfinityModel, prompts: Sequence[str], cache: Cache) -> float:
    """Seconds of one batch."""
    started = time.perf_counter()
    model.generate(prompts, cache, PromptNoise(0, range(len(prompts))))
    return time.perf_counter() - started


def main() -> None:
    """Prints medians in milliseconds per image and ratios to the full cache."""
    every = ",".join(sorted(path.stem for path in Path(conf.__file__).parent.glob("method/*.yaml")))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default=every)
    parser.add_argument("--budget", default="0.1")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with initialize_config_module("kvbench.conf", version_base="1.3"):
        model = instantiate(compose("config").model)
        names = dict.fromkeys(["full", *options.methods.split(",")])
        caches: dict[str, Cache] = {name: cache_of(name, model, options.budget) for name in names}
    model.load("cpu")
    pairs = {"plain loop": (plain_loop(model), PlainCache())} | {n: (model, c) for n, c in caches.items()}
    prompts = [str(line["prompt"]) for line in evaluation_prompts(options.batch)]
    seconds: dict[str, list[float]] = {name: [] for name in pairs}
    for repeat in range(options.repeats + 2):
        for name, (runner, cache) in pairs.items():
            elapsed = timed(runner, prompts, cache)
            if repeat >= 2:
                seconds[name].append(elapsed)
    base = statistics.median(seconds["full"])
    lines = [
        f"kvbench {kvbench.__version__}, {model.name}, batch {options.batch}, {options.threads} threads, float32",
        f"budget {options.budget}; median of {options.repeats} after 2 warm-ups, interleaved",
    ]
    for name, values in seconds.items():
        median = statistics.median(values)
        lines.append(f"{name:22s} {1e3 * median / options.batch:8.2f} ms/image   {median / base:.3f} x full")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
