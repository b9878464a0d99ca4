"""Infinity-2B with random weights: time against the plain loop, idle time, memory, shares of decoder and text."""

import tempfile
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from benchmarks.engine import cache_of, generate
from benchmarks.gpu_steps.base import Case, Failed, Figures, Machine
from benchmarks.gpu_steps.generations import SHRUNK
from benchmarks.gpu_steps.timing import find_idle, list_longest, time_turns, trace
from benchmarks.support.build import built, composed
from benchmarks.support.jobs import make_job
from benchmarks.support.plain_loop import PlainCache, plain_loop
from kvbench.models.infinity.model import InfinityModel
from kvbench.profile.task import profile
from kvbench.scenes.grammar import evaluation_prompts

CARD = ("model=infinity_2b", "model.weights=random")
REHEARSAL = ("model=infinity_tiny", *SHRUNK["infinity_tiny"])


def list_cases(machine: Machine) -> Iterator[Case]:
    """Yield the cases; a rehearsal has so few tokens that HeatKV takes a larger budget."""
    batch, budget = machine.choose((8, "0.1"), (1, "0.6"))
    loaded = cache(partial(load, machine))
    yield Case("time against the plain loop", partial(race, machine, loaded, batch, budget))
    if not machine.interpreted:
        yield Case("time of a single image", partial(race, machine, loaded, 1, budget))
    for method, own in (("full", "1"), ("heatkv", budget))[machine.choose(0, 0, 1) :]:
        yield Case(f"idle time, {method}", partial(watch, machine, loaded, method, own, batch))
    yield Case("memory and phases", partial(profile_both, machine, budget, batch))


def load(machine: Machine) -> InfinityModel:
    """Load the model with random weights."""
    model = built(composed(machine.choose(CARD, REHEARSAL))["model"])
    assert isinstance(model, InfinityModel)
    model.load(machine.device)
    return model


def list_prompts(batch: int) -> list[str]:
    """Return captions."""
    return [str(line["prompt"]) for line in evaluation_prompts(batch)]


def race(machine: Machine, loaded: Any, batch: int, budget: str) -> Figures:
    """Time the plain loop, the full cache and HeatKV in turns, and note the bytes in use at the peak."""
    model, prompts = loaded(), list_prompts(batch)
    pairs = {"plain loop": (plain_loop(model), PlainCache())}
    for name, own in (("full", "1"), ("heatkv", budget)):
        pairs[name] = model, cache_of(name, model, own, machine.device)
    peaks = dict.fromkeys(pairs, 0)

    def run(name: str) -> None:
        torch.cuda.reset_peak_memory_stats(machine.device)
        generate(*pairs[name], prompts)
        peaks[name] = torch.cuda.max_memory_allocated(machine.device)

    with machine.branches():
        seconds = time_turns(machine, {name: partial(run, name) for name in pairs}, machine.choose(2, 1))
    figures = {f"seconds_per_image {name}": round(each / batch, 5) for name, each in seconds.items()}
    return figures | {f"peak_bytes {name}": peak for name, peak in peaks.items()}


def watch(machine: Machine, loaded: Any, method: str, budget: str, batch: int) -> Figures:
    """Measure a generation after a first one: when the device waits, and what it runs.

    Returns:
        The share of time without a kernel, the same for each twelfth of the kernels, and the longest of them.
    """
    model, prompts = loaded(), list_prompts(batch)
    work = partial(generate, model, cache_of(method, model, budget, machine.device), prompts)
    with machine.branches():
        work()
        spans = trace(machine, work)
    times = [span[:2] for span in spans]
    twelfths = [part.tolist() for part in np.array_split(times, 12)]
    return {
        "idle_share": round(find_idle(times), 4),
        "idle_share of each twelfth": [round(find_idle(part), 3) for part in twelfths],
        "kernels": len(spans),
        "longest": list_longest(spans, 20),
    }


def profile_both(machine: Machine, budget: str, batch: int) -> Figures:
    """Run `task=profile` of HeatKV beside the full cache; compare the allocator's peak with the ledger.

    Raises:
        Failed: a cache did not fit, or held more than its budget.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            *machine.choose(CARD, REHEARSAL), "method=heatkv",
            f"budget={budget}", f"device={machine.device}", f"profile.batch_sizes=[{batch}]",
            f"profile.warmup={machine.choose(1, 0)}", f"profile.repeats={machine.choose(3, 1)}",
            f"runs_dir={folder}",
        ]  # fmt: skip
        job = make_job(settings)
        with machine.branches():
            _, found = profile(job)
    figures = {}
    for row in found["rows"]:
        if row["status"] != "ok":
            raise Failed(f"{row['cache']}: {row['status']}")
        if row["kv"]["peak_of_budget"] > 1:
            raise Failed(f"{row['cache']} holds {row['kv']['peak_of_budget']:.3f} of its budget")
        figures[row["cache"]] = describe(row)
    return figures


def describe(row: Any) -> Figures:
    """Return a row of a profile in few figures: bytes, and phases as shares."""
    phases, kv, allocator = row["phases"], row["kv"], row["allocator"]
    shares = {name: round(each / phases["total"], 4) for name, each in phases["seconds"].items()}
    figures = {
        "seconds": round(row["latency"]["median"], 4),
        "ledger_bytes": kv["peak_bytes"],
        "shares": shares,
    }
    if allocator is not None:
        beside = allocator["peak_bytes"] - allocator["before_bytes"]
        figures |= {"allocator_bytes": beside, "allocator_of_ledger": round(beside / kv["peak_bytes"], 3)}
    return figures
