"""Full-cache engine against a plain loop (torch.cat cache and SDPA, last scale stored as the official program does).

Same weights, same noise, same process, interleaved: python benchmarks/engine.py [--batch 8] [--repeats 9] [--threads 2]
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from torch import Tensor
from torch.nn import functional as F

import kvbench
from kvbench.attention_by_scale import AttentionByScale
from kvbench.budget import Budget
from kvbench.cache import KVCache
from kvbench.methods.base import Artifact, Method
from kvbench.methods.full import Full
from kvbench.methods.heatkv import HeatKV
from kvbench.models.base import Cache
from kvbench.models.pipeline import InfinityModel
from kvbench.models.sampling import PromptNoise
from kvbench.scenes.grammar import evaluation_prompts
from kvbench.segments import Segment


class PlainLoop:
    """The cache of the official program: keys and values concatenated at every scale, the last one included."""

    def reset(self, sequences: int) -> None:
        """Drops everything."""
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def begin(self, segment: Segment) -> None:
        """Nothing to prepare."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plain: object = None) -> Tensor:
        """Concatenates, then attends."""
        if layer in self._keys:
            k = torch.cat((self._keys[layer], k), 2)
            v = torch.cat((self._values[layer], v), 2)
        self._keys[layer], self._values[layer] = k, v
        return F.scaled_dot_product_attention(q, k, v, scale=1.0)


def prepared(model: InfinityModel, method: Method, budget: float) -> KVCache:
    """A cache with a method; without a calibration the heads' numbers order them."""
    scales = len(model.spec.segments)
    generator = torch.Generator().manual_seed(0)
    mass = torch.rand(
        model.spec.layers, model.spec.heads, scales, scales, generator=generator, dtype=torch.float64
    )
    method.prepare(
        model.spec, Budget.parse(budget, model.spec), Artifact(AttentionByScale.kind, {"mass": mass})
    )
    return KVCache(model.spec, method, dtype=torch.float32)


def timed(model: InfinityModel, prompts: Sequence[str], cache: Cache) -> float:
    """Seconds of one batch."""
    started = time.perf_counter()
    model.generate(prompts, cache, PromptNoise(0, range(len(prompts))))
    return time.perf_counter() - started


def main() -> None:
    """Prints medians in milliseconds per image and ratios to the plain loop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with initialize_config_module("kvbench.conf", version_base="1.3"):
        model = instantiate(compose("config").model)
    model.load("cpu")
    prompts = [str(line["prompt"]) for line in evaluation_prompts(options.batch)]
    caches: dict[str, Cache] = {
        "plain loop": PlainLoop(),
        "engine, full": prepared(model, Full(), 1),
        "engine, HeatKV 10 %": prepared(model, HeatKV(sinks=1), 0.1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    for repeat in range(options.repeats + 2):
        for name, cache in caches.items():
            elapsed = timed(model, prompts, cache)
            if repeat >= 2:
                seconds[name].append(elapsed)
    base = statistics.median(seconds["plain loop"])
    lines = [
        f"kvbench {kvbench.__version__}, {model.name}, batch {options.batch}, {options.threads} threads, float32",
        f"median of {options.repeats} after 2 warm-ups, interleaved",
    ]
    for name, values in seconds.items():
        median = statistics.median(values)
        lines.append(
            f"{name:22s} {1e3 * median / options.batch:8.2f} ms/image   {median / base:.3f} x plain loop"
        )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
