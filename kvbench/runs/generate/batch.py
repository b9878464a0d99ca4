"""One batch of a run: its samples and their costs, in one process or several."""

import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from kvbench.core.budget import Budget
from kvbench.core.config import ConfigError
from kvbench.engine.cache import KVCache
from kvbench.engine.coding.formats import CodebookTensors
from kvbench.engine.ledger import Ledger, add_ledgers
from kvbench.eval.files.kinds import READINGS
from kvbench.forced.decoding import ForcedDecoding, ForcedOutputs
from kvbench.forced.record import ScoredText
from kvbench.models.noise import make_noise
from kvbench.models.outputs import Outputs, Text
from kvbench.runs.generate.retention import Retention, join_heads, measure_retention
from kvbench.runs.job import Busy, Job
from kvbench.runs.prepare import prepare_method
from kvbench.runs.record.costs import Cost, describe_rows
from kvbench.runs.record.machine import describe_machine, find_load, read_waited

LEDGER_COSTS = (
    "peak_tokens", "peak_bytes", "rebuild_bytes", "transient_bytes", "state_bytes", "sequence_bytes"
)  # fmt: skip
"""Costs of a batch, named as in the ledger."""
Samples = Outputs | list[ScoredText]


class Batch(NamedTuple):
    """Samples of a batch of prompts, with their costs.

    Attributes:
        records: the lines of samples.jsonl.
        outputs: images, generated texts or scored texts.
        retention: retention of the batch with the run's first prompt; None for other batches.
    """

    records: list[dict[str, object]]
    outputs: Samples
    retention: Retention | None


class _ProcessBatch(NamedTuple):
    """A batch in one of the processes that hold the model together."""

    outputs: Samples
    ledger: Ledger
    gpu_peak_bytes: int
    gpu_reserved_bytes: int
    retention: Retention | None


def open_cache(job: Job, codebooks: CodebookTensors | None = None) -> KVCache:
    """Return a cache for this process's heads; the method is prepared, `codebooks` are static codebooks if needed."""
    plan = job.cache_plan
    return KVCache(
        plan.spec,
        job.method,
        dtype=plan.dtype,
        device=job.settings.device,
        record=plan.make_recorder(),
        projection=job.model.output_projection,
        packing=plan.packing,
        rotation=job.model.key_rotation(),
        codebooks=codebooks,
    )


def draw(job: Job, cache: KVCache, budget: Budget, chunk: range) -> Batch:
    """Generate the samples of a chunk of prompts and record their costs; other processes of the model do the same.

    Raises:
        ConfigError: another process generated a different text.
        ProcessLost: another process ended.
    """
    settings, processes, spec = job.settings, job.model.processes, job.model.spec
    processes.broadcast((job.is_reference, chunk))
    waited, started = read_waited(), time.perf_counter()
    batches = processes.gather(_generate_batch(job, cache, chunk))
    seconds = time.perf_counter() - started
    outputs = batches[0].outputs
    for rank, batch in enumerate(batches[1:], 1):
        if batch.outputs != outputs:
            raise ConfigError(
                f"model.tensor_parallel={processes.count}: process {rank} wrote a different text than process 0; use "
                "processors of one kind"
            )
    ledger = add_ledgers([batch.ledger for batch in batches])
    drift = ledger.lse_drift
    counts: dict[str, int] = {name: getattr(ledger, name) for name in LEDGER_COSTS}
    cost = partial(
        Cost,
        **counts,
        batch=len(chunk),
        seconds=round(seconds / len(chunk), 5),
        gpu_peak_bytes=sum(batch.gpu_peak_bytes for batch in batches),
        gpu_reserved_bytes=sum(batch.gpu_reserved_bytes for batch in batches) or None,
        lse_drift=None if drift is None else round(drift, 6),
        processes=processes.count if processes.count > 1 else None,
        device=settings.device,
        machine=describe_machine(settings.device),
        load=find_load(waited, seconds),
    )
    watched = job.method.uses.lse_queries > 0

    def describe_cost(number: int) -> dict[str, object]:
        """Return the costs of a sample, without costs that are None."""
        sequences = range(number, len(chunk) * spec.branches, len(chunk))
        drawn = _count_drawn(job, outputs[number])
        use = ledger.measure_use(spec, budget, sequences, drawn)._asdict()
        use["least_share"] = round(use["least_share"], 6)
        of_sample = cost(**use, bytes_read=ledger.reads.count(sequences, drawn))
        return {name: value for name, value in asdict(of_sample).items() if value is not None}

    records = [
        {"index": prompt.index, "prompt": prompt.text, "meta": prompt.meta, "seed": settings.seed}
        | describe_cost(number)
        | describe_rows(ledger, spec, number, _count_drawn(job, outputs[number]), watched)
        | ({"protected_drops": drops} if (drops := sum(ledger.unprotected[number :: len(chunk)])) else {})
        for number, prompt in enumerate(job.prompts[index] for index in chunk)
    ]
    retentions = [batch.retention for batch in batches if batch.retention is not None]
    return Batch(records, outputs, join_heads(retentions) if retentions else None)


def run_follower(job: Job) -> None:
    """Load a share of the model and generate every batch that process 0 generates, until it ends; write nothing.

    Raises:
        ProcessLost: another process ended.
        ConfigError, ValueError, WeightsError, BudgetExceeded, NotFinite: see where they are defined.
    """
    load(job)
    cache, was_reference = None, None
    while (order := job.model.processes.broadcast(None)) is not None:
        is_reference, chunk = order
        if cache is None or is_reference != was_reference:
            cache, was_reference = None, is_reference  # free the old cache before the new one is made
            one = job.reference if is_reference else job
            prepare_method(one, None)
            cache = open_cache(one)
        job.model.processes.gather(_generate_batch(one, cache, chunk))


def load(job: Job) -> None:
    """Load this process's share of the model unless it is loaded, and wait for the other processes.

    Raises:
        ConfigError: processes read different weights.
        ProcessLost, WeightsError: see where they are defined.
    """
    if not job.model.weights_sha256:
        job.model.load(job.settings.device)
    processes, read = job.model.processes, job.model.weights_sha256
    if processes.count > 1 and len({*processes.gather(read)}) > 1:
        raise ConfigError(
            f"model.tensor_parallel={processes.count}: processes read different weights; give all of them the same"
        )


def _count_drawn(job: Job, output: object) -> int | None:
    """Return the number of tokens that the model generated for a text; None for images and given texts."""
    if isinstance(output, ScoredText):
        return len(output.tokens) if isinstance(job.model, ForcedOutputs) else None
    return output.tokens if isinstance(output, Text) else None


def _locate_full(job: Job, chunk: range) -> list[Path] | None:
    """Return the files of the full cache's scored texts; None for the reference itself.

    Raises:
        Busy: another process still computes one.
    """
    if job.full_pass is None:
        return None
    paths = [READINGS.find(job.full_pass, index) for index in chunk]
    if missing := [path for path in paths if not path.is_file()]:
        raise Busy(f"{missing[0]}: another process computes it")
    return paths


def _generate_batch(job: Job, cache: KVCache, chunk: range) -> _ProcessBatch:
    device = torch.device(job.settings.device)
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    cache.prompts = chunk
    texts = [job.prompts[index].text for index in chunk]
    noise = make_noise(job.settings.noise, job.settings.seed, chunk, device)
    if isinstance(job.model, ForcedDecoding):
        outputs: Samples = job.model.score(texts, cache, noise, _locate_full(job, chunk))
    else:
        outputs = job.model.generate(texts, cache, noise)
    peak = torch.cuda.max_memory_allocated(device) if gpu else 0
    reserved = torch.cuda.max_memory_reserved(device) if gpu else 0
    retention = None if chunk.start else measure_retention(cache.held, cache.spec, len(chunk))
    cache.ledger.read_unprotected(cache.spec.heads)
    return _ProcessBatch(outputs, cache.ledger, peak, reserved, retention)
