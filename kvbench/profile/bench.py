"""Timed generations of one model: latency, memory and phases of several caches at one batch size."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from math import floor

import numpy as np
import torch

from kvbench.core.budget import Budget
from kvbench.core.devices import run_or_none_if_oom
from kvbench.core.segments import ModelSpec
from kvbench.engine.cache import KVCache
from kvbench.engine.coding.formats import CodebookTensors, Packing
from kvbench.engine.memory import cache_bytes
from kvbench.engine.recording.graphs import GraphRecorder
from kvbench.methods.shared.base import Method
from kvbench.models.noise import make_noise
from kvbench.profile.paths import watch_paths
from kvbench.profile.stopwatch import HostClock, Phases, StreamClock
from kvbench.runs.job import Job

MAX_BATCH = 4096
"""Batch size at which the search for the largest batch stops."""

ProfileRow = dict[str, object]


@dataclass
class Candidate:
    """Cache to time: a prepared method with its name, budget and low-bit storage."""

    name: str
    method: Method
    budget: Budget
    packing: Packing | None = None
    codebooks: CodebookTensors | None = None


class Bench:
    """Timed generations of a loaded model.

    Args:
        job: model, prompts and settings.
        advance: called after every generation.
        clock: clock for latencies and phases; None for the host's clock, and for phases on a GPU the CUDA stream's.
    """

    def __init__(self, job: Job, advance: Callable[[], object], clock: HostClock | None = None) -> None:
        self._job, self._advance = job, advance
        device = job.settings.device
        self._gpu = torch.device(device).type == "cuda"
        self._clock = clock or HostClock(device)
        self._stream = clock or (StreamClock(device) if self._gpu else self._clock)

    @property
    def more_generations(self) -> int:
        """Generations that recording CUDA graphs adds to a measurement of one candidate; 0 without graphs."""
        return 0 if self._job.cache_plan.graph_obstacle is not None else 4

    def measure(self, candidates: list[Candidate], batch: int, too_large: set[str]) -> list[ProfileRow]:
        """Measure every candidate at one batch size and return a row for each.

        `too_large` has the names of candidates that ran out of memory at a smaller batch; new ones are added.
        """
        rows = {c.name: ProfileRow(batch=batch, cache=c.name, status="ok") for c in candidates}
        for c in candidates:
            if c.name in too_large:
                rows[c.name]["status"] = "left out"
        for work in (self._measure_memories, self._measure_latencies, self._measure_phases):
            trying = [c for c in candidates if rows[c.name]["status"] == "ok"]
            for name, measured in work(trying, batch).items():
                rows[name] |= measured or {"status": "out of memory"}
        too_large |= {name for name, row in rows.items() if row["status"] == "out of memory"}
        full = rows.get("full", {})
        for row in rows.values():
            row["ratio_to_full"] = _compare(row, full)
        return list(rows.values())

    def make_generation(self, candidate: Candidate, batch: int) -> Callable[[], object]:
        """Return a function that generates once with a new cache."""
        return lambda: self._generate(
            self._make_cache(candidate, self._job.cache_plan.make_recorder()), batch
        )

    def fits(self, candidate: Candidate, batch: int) -> bool:
        """Return whether a batch fits in memory, with recordings too."""
        return run_or_none_if_oom(partial(self._measure_memory, candidate, batch)) is not None

    def _make_cache(self, candidate: Candidate, record: GraphRecorder | None) -> KVCache:
        job, plan = self._job, self._job.cache_plan
        return KVCache(
            job.model.spec,
            candidate.method,
            dtype=plan.dtype,
            device=job.settings.device,
            record=record,
            projection=job.model.output_projection,
            packing=candidate.packing,
            rotation=job.model.key_rotation(),
            codebooks=candidate.codebooks,
        )

    def _generate(self, cache: KVCache, batch: int) -> None:
        prompts = islice(cycle(self._job.prompts), batch)
        settings = self._job.settings
        noise = make_noise(settings.noise, settings.seed, range(batch), settings.device)
        self._job.model.generate([prompt.text for prompt in prompts], cache, noise)

    def _time(self, cache: KVCache, batch: int) -> float:
        self._clock.wait()
        start = self._clock.mark()
        self._generate(cache, batch)
        self._clock.wait()
        seconds = self._clock.between(start, self._clock.mark())
        self._advance()
        return seconds

    def _measure_memories(self, candidates: list[Candidate], batch: int) -> dict[str, ProfileRow | None]:
        """Measure the ledger, the allocator's peak and the time of a first generation, each candidate alone.

        If generations are recorded, the peak is of three: by launches, while recording, and replayed.
        """
        return {c.name: run_or_none_if_oom(partial(self._measure_memory, c, batch)) for c in candidates}

    def _measure_memory(self, candidate: Candidate, batch: int) -> ProfileRow:
        job, device = self._job, self._job.settings.device
        before = 0
        if self._gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        cache = self._make_cache(candidate, self._job.cache_plan.make_recorder())
        seconds = self._time(cache, batch)
        for _ in range(self.more_generations // 2):
            self._time(cache, batch)
        peak = torch.cuda.max_memory_allocated(device) if self._gpu else 0
        ledger, itemsize = cache.ledger, job.cache_plan.dtype.itemsize
        full = cache_bytes(job.model.spec.full_tokens, job.model.spec, batch, itemsize)
        allowed = _count_allowed(candidate.budget, job.model.spec, batch, itemsize)
        kv = {
            "peak_tokens": ledger.peak_tokens,
            "peak_bytes": ledger.peak_bytes,
            "rebuild_bytes": ledger.rebuild_bytes,
            "transient_bytes": ledger.transient_bytes,
            "state_bytes": ledger.state_bytes,
            "read_bytes": ledger.reads.count(range(batch * job.model.spec.branches)),
            "full_bytes": full,
            "budget_bytes": allowed,
            "peak_of_full": ledger.peak_bytes / full,
            "peak_of_budget": ledger.peak_bytes / allowed,
        }
        reserved = torch.cuda.max_memory_reserved(device) if self._gpu else 0
        allocator = (
            {"before_bytes": before, "peak_bytes": peak, "reserved_bytes": reserved} if self._gpu else None
        )
        return {"first_seconds": seconds, "kv": kv, "allocator": allocator}

    def _measure_latencies(self, candidates: list[Candidate], batch: int) -> dict[str, ProfileRow | None]:
        """Time warmed-up generations alternately; the order is reversed every round."""
        settings = self._job.settings.profile
        caches = {c.name: self._make_cache(c, self._job.cache_plan.make_recorder()) for c in candidates}
        seconds: dict[str, list[float]] = {name: [] for name in caches}
        failed: set[str] = set()
        for repeat in range(settings.warmup + settings.repeats):
            for name in list(caches)[:: 1 if repeat % 2 else -1]:
                elapsed = run_or_none_if_oom(partial(self._time, caches[name], batch))
                if elapsed is None:
                    failed.add(name)
                    del caches[name]
                elif repeat >= settings.warmup:
                    seconds[name].append(elapsed)
        return {
            name: None if name in failed else self._summarise(values, batch)
            for name, values in seconds.items()
        }

    def _summarise(self, seconds: list[float], batch: int) -> ProfileRow:
        low, median, high = (float(np.quantile(seconds, share)) for share in (0.1, 0.5, 0.9))
        return {
            "latency": {"median": median, "p10": low, "p90": high, "seconds": seconds},
            "seconds_per_image": median / batch,
            "images_per_second": batch / median,
            "tokens_per_second": batch * self._job.model.spec.drawn_tokens / median,
        }

    def _measure_phases(self, candidates: list[Candidate], batch: int) -> dict[str, ProfileRow | None]:
        return {c.name: run_or_none_if_oom(partial(self._split_phases, c, batch)) for c in candidates}

    def _split_phases(self, candidate: Candidate, batch: int) -> ProfileRow:
        """Return attention paths and the times of phases: by launches and, with CUDA graphs, by replays."""
        phases = Phases(self._stream)
        cache = self._make_cache(candidate, None)
        # This generation also builds the tables of the schedule.
        paths = watch_paths(cache, lambda: self._generate(cache, batch))
        launched = self._time_phases(cache, batch, phases)
        del cache
        record, recorded = self._job.cache_plan.make_recorder(), None
        if record is not None:
            cache = self._make_cache(candidate, phases.watch_recorder(record))
            for _ in range(2):  # the first runs by launches, the second is recorded
                self._generate(cache, batch)
            recorded = self._time_phases(cache, batch, phases)
        same = recorded is None
        return {
            "attention": paths,
            "phases": launched if same else recorded,
            "phases_by_launches": None if same else launched,
        }

    def _time_phases(self, cache: KVCache, batch: int, phases: Phases) -> ProfileRow:
        watched = [(cache, name) for name in ("reset", "begin", "attend")]
        phases.run(lambda: self._generate(cache, batch), {**self._job.model.calls, "cache": watched})
        self._advance()
        return {"seconds": phases.seconds(), "total": phases.total()}


def _count_allowed(budget: Budget, spec: ModelSpec, batch: int, itemsize: int) -> int:
    """Return the bytes of keys and values that a budget allows for a batch."""
    if budget.bytes is None:
        return cache_bytes(float(budget.capacity), spec, batch, itemsize)
    return floor(budget.bytes * spec.branches * batch)


def find_largest(fits: Callable[[int], bool], known: int, limit: int = MAX_BATCH) -> int:
    """Return the largest batch up to `limit` that fits, by doubling from a known one (or 0), then bisection."""
    good = known
    while good < limit and fits(bad := min(max(1, 2 * good), limit)):
        good = bad
    while good < limit and bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def _compare(row: ProfileRow, full: ProfileRow) -> float | None:
    if row["status"] != "ok" or full.get("status") != "ok":
        return None
    return float(str(row["seconds_per_image"])) / float(str(full["seconds_per_image"]))
