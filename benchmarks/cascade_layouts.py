"""Memory and time of the layouts of one kept set: Hard-KV's HA-Sparse and HA-Max, and the engine's ragged rows.

python -m benchmarks cascade_layouts [--slots 4096 ...] [--batch 1] [--threads 2] [--repeats 5] [--cpu-time] [--no-kept]
                                     [--model qwen3_4b] [--prompts aime24] [--method hard_kv] [--budget 0.25]
                                     [--tokens 1024] [overrides]
The first tables, one for each `--slots`, use the lengths of Hard-KV's published latencies at Qwen3-8B's shapes,
N x 0.5 x 0.93389^layer x 0.87215^head, with random slots (Hard-KV, Figures 5 and 16). The last table, omitted by
`--no-kept`, uses the slots that a method keeps after `--tokens` tokens of a model, by default a small Qwen3 with random
weights. Columns: allocated slots and bytes (keys, values, masks), share of useful slots, time to prepare all layers,
time of a step's attention in all layers, memory x (preparation + 128 steps), and its ratio to ragged rows, without and
with the 128 free slots after every row that all three layouts need. The line below has the steps after which rewriting
pays off. Keys and values are random float32 numbers.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.generate_loop import choose_cache, choose_model, draw_prompts, write_texts
from benchmarks.support.arguments import OVERRIDES, Option
from benchmarks.support.build import built, composed
from benchmarks.support.kept_layouts import (
    Cost,
    Way,
    attend_step,
    break_even,
    count_slots,
    find_utilisation,
    find_widths,
    integrate,
    lay,
    lay_dense,
)
from benchmarks.support.table import Table
from benchmarks.support.timing import choose_clock
from kvbench.engine.cache import KVCache
from kvbench.models.noise import PromptNoise

INTERVAL = 128
"""Steps between two preparations."""
LAYERS, HEADS, FOLD, CHANNELS = 36, 8, 4, 128
"""Layers, KV heads, query heads per KV head, and channels of Qwen3-8B."""
WAYS: dict[str, Way] = {"HA-Sparse": "sparse", "HA-Max": "max", "ragged": "ragged"}


def spread_lengths(slots: int, layers: int, heads: int) -> Tensor:
    """Return the published lengths int64 [layers, heads] for `slots` slots (benchmark of Hard-KV's program)."""
    layer, head = torch.arange(layers)[:, None].double(), torch.arange(heads).double()
    return (slots * 0.5 * 0.93389**layer * 0.87215**head).round().long()


def draw_slots(lengths: Tensor, slots: int, requests: int) -> Tensor:
    """Draw random kept slots, bool [layers, requests, heads, slots], for lengths [layers, heads]."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.rand(len(lengths), requests, lengths.shape[1], slots, generator=generator).argsort(-1)
    return ranks < lengths[:, None, :, None]


def read_kept(cache: KVCache) -> Tensor:
    """Return the kept tokens at the start of a generation's last segment, bool [layers, requests, heads, tokens]."""
    masks, start = [], cache.held.segment.start
    for layout in cache.held.layouts:
        position = layout.positions
        kept = torch.zeros(len(position), start + 1, dtype=torch.bool)
        kept.scatter_(1, position.masked_fill(position < 0, start), value=True)
        masks.append(kept[:, :start].unflatten(0, (-1, cache.spec.heads)))
    return torch.stack(masks)


def time_layout(
    way: Way, keep: Tensor, storage: list[tuple[Tensor, Tensor]], fold: int, options: argparse.Namespace
) -> tuple[float, float, int]:
    """Return the median seconds to prepare all layers and of a step in all layers, and the bytes of masks."""
    clock = choose_clock(options.cpu_time)
    rows, channels = keep.shape[1] * keep.shape[2], storage[0][0].shape[2]
    dense, kept = lay_dense(rows, keep.shape[3], INTERVAL), keep.flatten(1, 2)
    q = torch.randn(1, rows, fold, channels)
    k, v = (torch.randn(1, rows, 1, channels) for _ in range(2))
    prepared, steps = list[float](), list[float]()
    for _ in range(options.repeats + 1):
        started = clock()
        widths = find_widths(keep)
        laid = [lay(way, *pair, dense, kept[layer], widths) for layer, pair in enumerate(storage)]
        prepared.append(clock() - started)
        for filled in range(4):
            started = clock()
            for layer in laid:
                attend_step(q, k, v, layer, filled, channels**-0.5)
            steps.append(clock() - started)
        masks = sum(layer.bits.nbytes for layer in laid if hasattr(layer, "bits"))
        del laid
    return statistics.median(prepared[1:]), statistics.median(steps[4:]), masks


def print_table(keep: Tensor, fold: int, channels: int, options: argparse.Namespace) -> None:
    """Measure the layouts of kept slots bool [layers, requests, heads, slots] and print their table."""
    layers, requests, heads, slots = keep.shape
    lengths = keep.sum(3)
    used = statistics.mean(find_utilisation(lengths[:, request]) for request in range(requests))
    print(
        f"{layers} layers, {requests} x {heads} KV heads of {channels} channels, {slots} tokens: "
        f"{float(lengths.double().mean()) / slots:.3f} kept overall, {int(lengths.max()) / slots:.3f} at most, "
        f"SU {used:.3f}"
    )
    columns = {"slots": "d", "MiB": ".1f", "useful": ".3f", "prepare, ms": ".2f", "step, ms": ".3f"}
    columns |= {"slot s": ".0f", "MiB s": ".2f", "of ragged": ".2f", "with room": ".2f"}
    table = Table(columns, width=10)
    shape, free_slots = (
        (1, requests * heads * (slots + INTERVAL), channels),
        layers * requests * heads * INTERVAL,
    )
    storage = [(torch.rand(shape), torch.rand(shape)) for _ in range(layers)]
    rows = []
    for name, way in WAYS.items():
        prepare, step, masks = time_layout(way, keep, storage, fold, options)
        taken = count_slots(keep, way)
        rows.append((name, taken, taken * 2 * channels * 4 + masks, prepare, step))
    base, padded = (integrate(rows[-1][1] + more, *rows[-1][3:], INTERVAL) for more in (0, free_slots))
    for name, taken, size, prepare, step in rows:
        whole = integrate(taken, prepare, step, INTERVAL)
        bytes_seconds = integrate(size, prepare, step, INTERVAL) / 2**20
        with_room = integrate(taken + free_slots, prepare, step, INTERVAL) / padded
        useful = int(lengths.sum()) / taken
        times = (1e3 * prepare, 1e3 * step, whole, bytes_seconds, whole / base, with_room)
        table.add(name, taken, size / 2**20, useful, *times)
    costs = {name: Cost(taken, prepare, step) for name, taken, _, prepare, step in rows}
    times = break_even(costs["HA-Sparse"], costs["HA-Max"])
    print(
        f"rewriting is faster than masks after {times[0]:.1f} steps in time, {times[1]:.1f} in slots x time"
    )


OPTIONS = {
    "model": None, "method": "hard_kv", "budget": "0.25", "batch": 1, "tokens": 1024, "threads": 2, "repeats": 5,
    "cpu_time": False, **OVERRIDES,
    "prompts": Option(None, "prompts of conf/prompts; random tokens by default"),
    "slots": Option([4096], "slots of the first tables"),
    "no_kept": Option(False, "print only the tables of published lengths"),
}  # fmt: skip


def main(options: argparse.Namespace) -> None:
    """Print all tables."""
    for slots in options.slots:
        with torch.inference_mode():
            kept = draw_slots(spread_lengths(slots, LAYERS, HEADS), slots, options.batch)
            print_table(kept, FOLD, CHANNELS, options)
    if options.no_kept:
        return
    model = choose_model(options)
    config, cache = model.transformer, choose_cache(model, options.method, options)
    run: Callable[[], object] = partial(write_texts, model, draw_prompts(model, options.batch), cache)
    if options.prompts:
        problems = {**composed([f"prompts={options.prompts}"])["prompts"], "count": options.batch}
        texts = [prompt.text for prompt in built(problems).load()]
        run = partial(model.generate, texts, cache, PromptNoise(0, range(options.batch)))
    run()
    keep = read_kept(cache)
    print(f"\n{options.method} at a budget of {options.budget} on {model.name}:")
    with torch.inference_mode():
        print_table(keep, config.heads // config.kv_heads, config.head_dim, options)
