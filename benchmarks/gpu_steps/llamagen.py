"""Step that measures LlamaGen-XL with random weights: tokens per second with and without CUDA graphs, noise."""

from collections.abc import Iterator
from functools import partial
from typing import get_args

from benchmarks.gpu_steps.base import Case, Failed, Figures, Machine
from benchmarks.gpu_steps.generations import Generator, are_equal, load, shrink
from benchmarks.support.timing import choose_clock, take_turns
from kvbench.engine.cache import KVCache
from kvbench.models.noise import Kind, make_noise
from kvbench.models.outputs import Outputs
from kvbench.profile.stopwatch import HostClock, Phases

TOKENIZER = ("codes=128", "latents=16", "widths=[32,32,64]", "blocks=1")
SHRUNK = shrink(
    *(f"model.tokenizer.{setting}" for setting in TOKENIZER),
    kv_heads=2,
    head_dim=16,
    hidden=64,
    vocabulary=128,
    grid="[3,3]",
)
"""Overrides that make the model small enough for an interpreter."""


def list_cases(machine: Machine) -> Iterator[Case]:
    """Yield a case per kind of noise, in which runs with and without graphs take turns on one model."""
    for kind in get_args(Kind):
        yield Case(f"tokens per second, {kind}", partial(race, machine, machine.choose(8, 1), kind))


def race(machine: Machine, batch: int, kind: Kind) -> Figures:
    """Time generations without graphs and with them; the images must be equal."""
    settings = ["model=llamagen_xl", "model.weights=random", "prompts=imagenet", *machine.choose((), SHRUNK)]
    loaded = load(settings, batch, machine.device)
    method, records = loaded.prepare(["method=full"], "1"), {"plain": None}
    if not machine.interpreted:
        records |= {"graphs": machine.make_record(loaded.model.spec)}
    caches = {name: loaded.open_cache(method, record=record) for name, record in records.items()}

    def draw(cache: KVCache) -> Outputs:
        return loaded.draw(cache, noise=make_noise(kind, 0, range(batch), machine.device))

    with machine.branches():
        runs = {name: partial(draw, cache) for name, cache in caches.items()}
        times = take_turns(runs, machine.choose(2, 1), choose_clock(False, machine.device))
        # Counter-based noise is generated inside the sampling kernels.
        shares = {
            name: measure_noise(machine, loaded, cache) for name, cache in caches.items() if kind == "stream"
        }
    images = [timed.result for timed in times.values()]
    if not are_equal(images[0], images[-1]):
        raise Failed("images with graphs differ from those without")
    spec, steps = loaded.model.spec, loaded.model.spec.drawn_tokens
    figures = {}
    for name, timed in times.items():
        figures[f"tokens_per_second {name}"] = round(batch * steps / timed.seconds, 1)
        figures[f"ms_per_step {name}"] = round(1e3 * timed.seconds / steps, 3)
    sequences = range(batch * spec.branches)
    figures["read_bytes_per_step"] = round(caches["plain"].ledger.reads.count(sequences) / steps)
    return figures | {f"noise_share {name}": round(share, 4) for name, share in shares.items()}


def measure_noise(machine: Machine, loaded: Generator, cache: KVCache) -> float:
    """Return the share of a generation's time that the host spends on streams of noise."""
    clock = HostClock(machine.device)
    noise, phases = make_noise("stream", 0, range(len(loaded.prompts)), machine.device), Phases(clock)
    phases.run(lambda: loaded.draw(cache, noise=noise), {"noise": [(noise, "draw")]})
    clock.wait()
    return phases.seconds().get("noise", 0.0) / phases.total()
