"""One batch of a run: its samples and their costs, in one process or several together."""

import time
from dataclasses import asdict
from typing import NamedTuple

import torch

from kvbench.core.config import ConfigError
from kvbench.engine.cache import KVCache
from kvbench.engine.coding.formats import Books
from kvbench.engine.ledger import Ledger, add_ledgers
from kvbench.methods.shared.capabilities import count_lse_queries
from kvbench.models.noise import PromptNoise
from kvbench.models.outputs import Outputs
from kvbench.runs.generate.retention import Retention, join_heads, measure_retention
from kvbench.runs.job import Job
from kvbench.runs.record.costs import Cost
from kvbench.runs.record.steps import describe_rows

COUNTED = (
    "peak_tokens", "peak_bytes", "rebuild_bytes", "transient_bytes", "state_bytes", "last_tokens", "sequence_bytes",
    "last_bytes",
)  # fmt: skip
"""Costs that the ledger counts."""


class Drawn(NamedTuple):
    """Outcome of a batch of prompts.

    Attributes:
        records: a line of samples.jsonl each.
        made: images or texts.
        retention: what was kept of them, where the run's first prompt is among them; None of all others.
    """

    records: list[dict[str, object]]
    made: Outputs
    retention: Retention | None


class _Share(NamedTuple):
    """One process's part of a batch."""

    made: Outputs
    ledger: Ledger
    gpu_peak_bytes: int
    gpu_reserved_bytes: int
    retention: Retention | None


def open_cache(job: Job, books: Books | None = None) -> KVCache:
    """Return a cache for this process's heads; the method is prepared.

    Args:
        job: the run.
        books: static codebooks, if it wants them.
    """
    return KVCache(
        job.shard_spec,
        job.method,
        dtype=job.dtype,
        device=job.settings.device,
        record=job.record,
        projection=job.model.output_projection,
        packing=job.packing,
        rotation=job.model.key_rotation(),
        books=books,
    )


def draw(job: Job, cache: KVCache, part: range) -> Drawn:
    """Generate the samples of some prompts and record their costs; the other processes generate the same.

    Raises:
        ConfigError: they made something else.
        ProcessLost: one of them ended.
    """
    settings, processes = job.settings, job.processes
    prompts = [job.prompts[index] for index in part]
    processes.broadcast((job.reference, part))
    started = time.perf_counter()
    shares = processes.gather(_make(job, cache, part))
    seconds = time.perf_counter() - started
    made = shares[0].made
    for rank, share in enumerate(shares[1:], 1):
        if share.made != made:
            raise ConfigError(
                f"model.tensor_parallel={processes.count}: process {rank} wrote another text than process 0; their "
                "processors must be of one kind"
            )
    ledger = add_ledgers([share.ledger for share in shares])
    drift = ledger.lse_drift
    counted: dict[str, int] = {name: getattr(ledger, name) for name in COUNTED}
    cost = Cost(
        **counted,
        batch=len(part),
        seconds=round(seconds / len(part), 5),
        least_share=round(ledger.find_least_share(job.model.spec, job.allowance.final), 6),
        gpu_peak_bytes=sum(share.gpu_peak_bytes for share in shares),
        gpu_reserved_bytes=sum(share.gpu_reserved_bytes for share in shares) or None,
        lse_drift=None if drift is None else round(drift, 6),
        processes=processes.count if processes.count > 1 else None,
    )
    # Costs that a sample does not have are left out.
    known = {name: value for name, value in asdict(cost).items() if value is not None}
    shared = {"seed": settings.seed, **known}
    records = [
        {"index": prompt.index, "prompt": prompt.text, "meta": prompt.meta, **shared}
        | describe_rows(ledger, job.model.spec, number, made, count_lse_queries(job.method) > 0)
        for number, prompt in enumerate(prompts)
    ]
    kept = [share.retention for share in shares if share.retention is not None]
    return Drawn(records, made, join_heads(kept) if kept else None)


def follow(job: Job) -> None:
    """Load a share of the model and make what the process that leads makes, until it has no more; write nothing.

    Raises:
        ProcessLost: another process ended.
        ConfigError, ValueError, WeightsError, BudgetExceeded, NotFinite: see where they are defined.
    """
    load(job)
    cache, known = None, None
    while (order := job.processes.broadcast(None)) is not None:
        reference, part = order
        if cache is None or reference != known:
            cache, known = None, reference  # the old one is gone before the new one is made
            one = job.as_reference() if reference else job
            one.method.prepare(one.shard_spec, one.allowance.shard)
            cache = open_cache(one)
        job.processes.gather(_make(one, cache, part))


def load(job: Job) -> None:
    """Load this process's share of the model unless it is loaded, and wait for the others to have theirs.

    Raises:
        ConfigError: not all of them read the same weights.
        ProcessLost, WeightsError: see where they are defined.
    """
    if not job.model.weights_sha256:
        job.model.load(job.settings.device)
    if len(set(job.processes.gather(job.model.weights_sha256))) > 1:
        raise ConfigError(
            f"model.tensor_parallel={job.processes.count}: processes read different weights; give all of them the same"
        )


def _make(job: Job, cache: KVCache, part: range) -> _Share:
    device = torch.device(job.settings.device)
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    cache.prompts = part
    texts = [job.prompts[index].text for index in part]
    made = job.model.generate(texts, cache, PromptNoise(job.settings.seed, part))
    peak = torch.cuda.max_memory_allocated(device) if gpu else 0
    reserved = torch.cuda.max_memory_reserved(device) if gpu else 0
    retention = None if part.start else measure_retention(cache.held, job.shard_spec, len(part))
    return _Share(made, cache.ledger, peak, reserved, retention)
