"""Tokens per second of next-token decoding: the engine against the official program's loops, on the same weights.

python -m benchmarks llamagen_loop [--model llamagen_tiny] [--batch 8] [--threads 2] [--budget 0.167] [overrides]
The official loops (`support/official_llamagen.py`) are LlamaGen's `generate.py`, eager and, where torch.compile works,
with compiled steps as in its FID script. Generations take turns in one process. The table has the median seconds, image
tokens per second, and the time relative to the full cache's. `--slope` also prints the growth of a step's time with
earlier tokens. On a GPU (--device cuda --model llamagen_xl model.weights=random) the engine records graphs.
"""

import argparse
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.support.arguments import OVERRIDES, Option
from benchmarks.support.build import build_model, open_cache, prepare_method
from benchmarks.support.fake_gpu import list_prompts
from benchmarks.support.official_llamagen import CompiledLoop, OfficialLoop
from benchmarks.support.table import Table
from benchmarks.support.timing import Clock, choose_clock, take_turns
from kvbench.core.segments import Segment
from kvbench.engine.cache import KVCache
from kvbench.engine.recording.graphs import CudaGraphs
from kvbench.models.llamagen.model import LlamaGenModel
from kvbench.models.noise import PromptNoise
from kvbench.models.token_loop import ImageHead, draw_tokens


def prepare_cache(model: LlamaGenModel, name: str, budget: str, device: str = "cpu") -> KVCache:
    """Open a cache with a method of `conf/method`, whose steps a GPU records."""
    method = prepare_method(model.spec, budget, [f"method={name}", f"sinks={model.default_sinks}"])
    return open_cache(model, method, device, record=CudaGraphs() if device.startswith("cuda") else None)


def measure_slope(
    cache: KVCache, model: LlamaGenModel, run: Callable[[], object], repeats: int, clock: Clock
) -> Tensor:
    """Measure the time of a step by earlier tokens; return float64 [segments after the prompt, 2].

    Columns: tokens before the middle of a segment, median seconds of its steps.
    """
    rounds, stamps, begin = [], list[float](), cache.begin

    def stamped(segment: Segment) -> None:
        stamps.append(clock())
        begin(segment)

    with patch.object(cache, "begin", stamped):
        for _ in range(repeats):
            stamps.clear()
            run()
            rounds.append([*stamps, clock()])
    seconds = torch.tensor(rounds, dtype=torch.float64).diff(dim=1).median(0).values[1:]
    lengths = torch.tensor(model.spec.lengths[1:], dtype=torch.float64)
    middle = torch.tensor([s.start for s in model.spec.segments[1:]], dtype=torch.float64) + lengths / 2
    return torch.stack((middle, seconds / lengths), 1)


def print_slope(name: str, points: Tensor) -> None:
    """Print the growth of a step's time with earlier tokens (`measure_slope`)."""
    slope, start = np.polyfit(*points.T.numpy(), 1)
    shortest, longest = points[:, 1].aminmax()
    print(
        f"{name}, a step: {1e3 * shortest:.2f} to {1e3 * longest:.2f} ms, {1e3 * start:.2f} ms "
        f"+ {1e6 * slope:.3f} us for every token before it"
    )


OPTIONS = {
    "model": "llamagen_tiny", "batch": 8, "threads": 2, "budget": "0.1667", "device": "cpu",
    "methods": "linear_ar,headkv,snapkv,streaming_llm", "repeats": 7, "slope": False,
    "cpu_time": False, "eager": Option(False, "leave out the compiled official loop, which takes a minute to compile"),
    **OVERRIDES,
}  # fmt: skip


def main(options: argparse.Namespace) -> None:
    """Print milliseconds per step of the official loops and of kvbench's."""
    model = build_model(options.model, *options.overrides)
    assert isinstance(model, LlamaGenModel)
    model.load(options.device)
    transformer, config, sampling = model._transformer, model.transformer, model.sampling
    tokens, padding = model._read(list_prompts(model, options.batch))
    if padding is not None:
        raise ValueError(
            f"--model {options.model}: the official loop needs prompts of equal length; choose another model"
        )
    condition = transformer.cls_embedding(tokens, guided=sampling.branches > 1)

    def draw_on_engine(cache: KVCache) -> object:
        noise = PromptNoise(0, range(options.batch))
        return draw_tokens(transformer, condition, model.spec.segments, cache, noise, ImageHead(sampling))

    full = prepare_cache(model, "full", "1", options.device)
    runs: dict[str, Callable[[], object]] = {
        "official loop": partial(OfficialLoop(transformer, sampling).generate, condition)
    }
    if not options.eager:
        compiled = partial(CompiledLoop(transformer, sampling).generate, condition)
        runs |= {"official, compiled": compiled} if can_compile(compiled) else {}
    runs["full"] = partial(draw_on_engine, full)
    for name in options.methods.split(","):
        cache = prepare_cache(model, name, options.budget, options.device)
        runs[f"{name} {options.budget}"] = partial(draw_on_engine, cache)
    clock = choose_clock(options.cpu_time, options.device)
    times = take_turns(runs, options.repeats, clock)
    print(f"{model.name}: {config.tokens} tokens an image, batch {options.batch}, {options.threads} threads")
    table = Table({"s": ".3f", "tokens/s": ".0f", "x full": ".3f", "its 95 % interval": ""}, width=24)
    for name, timed in times.items():
        rate = options.batch * config.tokens / timed.seconds
        table.add(name, timed.seconds, rate, *timed.compare(times["full"]))
    if options.slope:
        print_slope("full", measure_slope(full, model, runs["full"], options.repeats, clock))


def can_compile(run: Callable[[], object]) -> bool:
    """Run a compiled loop once and return whether that works here; print why not."""
    try:
        run()
    except torch._dynamo.exc.TorchDynamoException as error:  # no C++ compiler, no Triton, unknown operation
        print(
            f"official, compiled: left out, torch.compile fails here ({str(error).strip().splitlines()[0]})"
        )
        return False
    return True
