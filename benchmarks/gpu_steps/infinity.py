"""Step that measures Infinity-2B with random weights: time against the plain loop, idle time, memory, phases."""

import tempfile
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from benchmarks.engine import cache_of, generate
from benchmarks.gpu_steps.base import Case, Failed, Figures, Machine
from benchmarks.gpu_steps.generations import SHRUNK, load
from benchmarks.gpu_steps.timing import find_idle, list_longest, trace
from benchmarks.support.fake_gpu import list_captions
from benchmarks.support.jobs import make_job
from benchmarks.support.plain_loop import PlainCache, plain_loop
from benchmarks.support.timing import choose_clock, take_turns
from kvbench.profile.task import profile

CARD = ("model=infinity_2b", "model.weights=random")
REHEARSAL = ("model=infinity_tiny", *SHRUNK["infinity_tiny"])


def list_cases(machine: Machine) -> Iterator[Case]:
    """Yield the cases; a rehearsal has few tokens, so HeatKV needs a larger budget."""
    batch, budget = machine.choose((8, "0.1"), (1, "0.6"))
    loaded = cache(lambda: load(machine.choose(CARD, REHEARSAL), 1, machine.device).model)
    yield Case("time against the plain loop", partial(race, machine, loaded, batch, budget))
    if not machine.interpreted:
        yield Case("time of a single image", partial(race, machine, loaded, 1, budget))
    for method, share in (("full", "1"), ("heatkv", budget))[machine.choose(0, 0, 1) :]:
        yield Case(f"idle time, {method}", partial(watch, machine, loaded, method, share, batch))
    yield Case("memory and phases", partial(profile_both, machine, budget, batch))


def race(machine: Machine, loaded: Any, batch: int, budget: str) -> Figures:
    """Time the plain loop, the full cache and HeatKV alternately, and record peak bytes."""
    model, prompts = loaded(), list_captions(batch)
    pairs = {"plain loop": (plain_loop(model), PlainCache())}
    for name, share in (("full", "1"), ("heatkv", budget)):
        pairs[name] = model, cache_of(name, model, share, machine.device)
    peaks = dict.fromkeys(pairs, 0)

    def run(name: str) -> None:
        torch.cuda.reset_peak_memory_stats(machine.device)
        generate(*pairs[name], prompts)
        peaks[name] = torch.cuda.max_memory_allocated(machine.device)

    with machine.branches():
        runs, clock = {name: partial(run, name) for name in pairs}, choose_clock(False, machine.device)
        times = take_turns(runs, machine.choose(2, 1), clock)
    figures = {f"seconds_per_image {name}": round(each.seconds / batch, 5) for name, each in times.items()}
    return figures | {f"peak_bytes {name}": peak for name, peak in peaks.items()}


def watch(machine: Machine, loaded: Any, method: str, budget: str, batch: int) -> Figures:
    """Measure the idle share of a second generation and of each twelfth of its kernels; list the slowest kernels."""
    model, prompts = loaded(), list_captions(batch)
    work = partial(generate, model, cache_of(method, model, budget, machine.device), prompts)
    with machine.branches():
        work()
        spans = trace(machine, work)
    times = [span[:2] for span in spans]
    twelfths = [chunk.tolist() for chunk in np.array_split(times, 12)]
    return {
        "idle_share": round(find_idle(times), 4),
        "idle_share of each twelfth": [round(find_idle(chunk), 3) for chunk in twelfths],
        "kernels": len(spans),
        "longest": list_longest(spans, 20),
    }


def profile_both(machine: Machine, budget: str, batch: int) -> Figures:
    """Run `task=profile` for HeatKV and the full cache; neither may exceed its budget."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            *machine.choose(CARD, REHEARSAL), "method=heatkv",
            f"budget={budget}", f"device={machine.device}", f"profile.batch_sizes=[{batch}]",
            f"profile.warmup={machine.choose(1, 0)}", f"profile.repeats={machine.choose(3, 1)}",
            f"runs_dir={folder}",
        ]  # fmt: skip
        job = make_job(settings)
        with machine.branches():
            _, report = profile(job)
    figures = {}
    for row in report["rows"]:
        if row["status"] != "ok":
            raise Failed(f"{row['cache']}: {row['status']}")
        if row["kv"]["peak_of_budget"] > 1:
            raise Failed(f"{row['cache']} holds {row['kv']['peak_of_budget']:.3f} of its budget")
        figures[row["cache"]] = describe(row)
    return figures


def describe(row: Any) -> Figures:
    """Return the main figures of a profile's row: bytes, and phases as shares."""
    phases, kv, allocator = row["phases"], row["kv"], row["allocator"]
    shares = {name: round(seconds / phases["total"], 4) for name, seconds in phases["seconds"].items()}
    figures = {
        "seconds": round(row["latency"]["median"], 4),
        "ledger_bytes": kv["peak_bytes"],
        "read_bytes": kv["read_bytes"],
        "shares": shares,
    }
    if allocator is not None:
        added = allocator["peak_bytes"] - allocator["before_bytes"]
        figures |= {"allocator_bytes": added, "allocator_of_ledger": round(added / kv["peak_bytes"], 3)}
    return figures
