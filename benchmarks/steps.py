"""Time of one-token steps: every method on the engine against a plain loop (torch.cat and SDPA) of the same weights.

python -m benchmarks steps [--methods full,snapkv] [--budget 0.25] [--tokens 512] [--segment 32] [--batch 1]
Interleaved in one process; prints the median seconds of a generation, tokens per second, and the plain loop's time over
the method's (above 1: the method is faster).
"""

import argparse
from functools import partial

import torch

from benchmarks.support.arguments import Option
from benchmarks.support.build import list_choices, prepare_method
from benchmarks.support.decoder import Decoder, PlainCache, Shape, random_prompts, rows_of
from benchmarks.support.table import Table
from benchmarks.support.timing import choose_clock, take_turns
from kvbench.core.budget import InfeasibleBudget
from kvbench.engine.cache import KVCache
from kvbench.models.base import Cache

OPTIONS = {
    "methods": list_choices("method"), "budget": "0.25", "tokens": 512, "batch": 1, "repeats": 9, "threads": 1,
    "cpu_time": False,
    "segment": Option(32, "tokens of a segment; 32: a row of 512 pixels"),
}  # fmt: skip


def main(options: argparse.Namespace) -> None:
    """Print the table."""
    shape = Shape(rows=rows_of(options.tokens, options.segment))
    decoder, prompts = Decoder(shape), random_prompts(shape, options.batch)
    caches: dict[str, Cache] = {"plain loop": PlainCache()}
    lines = []
    for name in dict.fromkeys(["full", *options.methods.split(",")]):
        try:
            method = prepare_method(
                shape.spec, options.budget, [f"method={name}", "sinks=1", "protect=paper"]
            )
        except (ValueError, InfeasibleBudget) as error:
            lines.append(f"{name:20s} left out: {error}")
        else:
            caches[name] = KVCache(shape.spec, method, dtype=torch.float32)
    runs = {name: partial(decoder.generate, prompts, cache) for name, cache in caches.items()}
    found = take_turns(runs, options.repeats, choose_clock(options.cpu_time))
    print(
        f"{options.tokens} tokens in segments of {options.segment}, batch {options.batch}, {options.threads} threads, "
        f"budget {options.budget}, median of {options.repeats}"
    )
    table = Table({"s": ".3f", "tokens/s": ".0f", "plain loop / this": ".3f"})
    for name, (seconds, _) in found.items():
        table.add(
            name, seconds, options.tokens * options.batch / seconds, found["plain loop"].seconds / seconds
        )
    print("\n".join(lines))
