"""Attention operations under methods with sparse reads, counted on a model's schedule.

python -m benchmarks reads [--model infinity_8b] [--budget 1] [--layers 4] [--method quest method.page=32 ...]

A generation of random queries, keys and values runs through the cache, with one narrow KV head in each of the first
`--layers` layers. Each pair of a query and an attended key counts as 4 operations per channel of the model's real heads
(q k^T and the sum of values), for one prompt with all branches and all layers, without projections. Without `--method`
the sparse methods of this family are counted, at settings that at least halve reads. Time is not measured, since the
cache copies the selected keys.
"""

import argparse
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.support.arguments import OVERRIDES, Option
from benchmarks.support.build import build_model, prepare_method
from benchmarks.support.table import Table
from kvbench.core.segments import ModelSpec
from kvbench.engine.cache import KVCache
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.view import View

CASES: dict[str, tuple[tuple[str, ...], ...]] = {
    "next-scale": (("full",), ("hackpp", "method.attention_budget=0.3"), ("sparvar", "method.density=0.3")),
    "next-token": (
        ("full",),
        ("quest", "method.attention_budget=256"),
        ("quest", "method.attention_budget=128"),
    ),
}
"""Default methods and settings by family."""
CHANNELS = 8  # channels of the narrow head

OPTIONS = {
    "model": "infinity_tiny", "budget": "1", "method": None, "layers": Option(4, "layers to run"),
} | OVERRIDES  # fmt: skip


def main(options: argparse.Namespace) -> None:
    """Print the operations of attention, a row per method."""
    whole = build_model(options.model).spec
    layers = min(options.layers, whole.layers)
    spec = replace(whole, layers=layers, heads=1, head_dim=CHANNELS, branches=1, group=1)
    cases = () if options.method is None else ((options.method, *options.overrides),)
    table = Table({"GFLOPs": ".3f", "of full": ".3f"}, "attention", 44)
    full = count_pairs(spec, prepare_method(spec, 1, ["method=full"]))
    heads = whole.heads * whole.group * whole.branches
    for method, *settings in cases or CASES[whole.family]:
        overrides = [f"model={options.model}", f"method={method}", *settings]
        pairs = count_pairs(spec, prepare_method(spec, options.budget, overrides))
        work = 4 * pairs * heads * whole.head_dim * whole.layers / layers
        table.add(" ".join([method, *settings]), work / 1e9, pairs / full)


def count_pairs(spec: ModelSpec, method: Method) -> int:
    """Return the attended pairs of a query and a key of one sequence, over all layers of the spec."""
    counter = Counter(method)
    generate(spec, method, counter)
    return counter.pairs


def generate(spec: ModelSpec, method: Method, counter: "Counter | None" = None) -> KVCache:
    """Run a generation of random queries, keys and values of one sequence; return the cache with its ledger."""
    cache = KVCache(spec, method, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    cache.reset(spec.branches)
    for segment in spec.segments:
        cache.begin(segment)
        # The prompt is one step; later causal segments have a step per token.
        steps = segment.length if segment.causal and segment.index else 1
        for _ in range(steps):
            tokens = segment.length // steps
            for layer in range(spec.layers):
                if counter is not None:
                    store = cache._stores[layer]
                    counter.begin(store.layout.total + store.filled, tokens, causal=segment.causal)
                heads = (spec.heads * spec.group, spec.heads, spec.heads)
                shapes = [(spec.branches, count, tokens, spec.head_dim) for count in heads]
                cache.attend(layer, *(torch.randn(shape, generator=generator) for shape in shapes))
    return cache


class Counter:
    """Counter of query-key pairs, dense or selected by a method."""

    def __init__(self, method: Method) -> None:
        self.pairs = 0
        self._all, self._queries = 0, 0
        if method.uses.sparse_reads:
            self._select = method.select_attended
            method.select_attended = self.select  # type: ignore[method-assign]

    def begin(self, cached: int, queries: int, *, causal: bool) -> None:
        """Count the pairs of a layer's dense attention to `cached` and `queries` keys."""
        self._queries = queries
        self._all = cached * queries + (queries * (queries + 1) // 2 if causal else queries * queries)
        self.pairs += self._all

    def select(self, view: View) -> Tensor | None:
        """Return the method's selection, and count its pairs instead of all pairs."""
        selection = self._select(view)
        if selection is not None:
            self.pairs += int((selection & (view.position >= 0)).sum()) * self._queries - self._all
        return selection
