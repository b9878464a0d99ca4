"""Blocks of a run: groups of prompts that one process claims, generates and saves together."""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

from kvbench.core.background import Work, working_beside
from kvbench.core.bars import make_bar
from kvbench.core.budget import Budget
from kvbench.core.claims import claim
from kvbench.core.config import ConfigError
from kvbench.core.devices import run_or_none_if_oom
from kvbench.engine.cache import KVCache
from kvbench.runs.generate.batch import Batch, draw
from kvbench.runs.generate.retention import FILE as RETENTION
from kvbench.runs.job import Job
from kvbench.runs.record.folder import RunFolder, blocks
from kvbench.runs.record.origins import describe_difference, read_digests

log = logging.getLogger(__name__)


def generate(job: Job, folder: RunFolder, cache: KVCache, budget: Budget) -> bool:
    """Generate the missing blocks of this shard; return whether all samples of the run exist.

    Processes that share a run take different blocks. A job that waits for others comes back to their blocks at the end
    and takes over the blocks of a process that died. Out of memory, a process halves the prompts that it generates at
    a time. A block is saved while the next one is generated, and stays claimed until then. `budget` is the method's.

    Raises:
        Busy: the context of a block refuses it.
        ConfigError: another process started the run anew with another calibration or engine.
    """
    settings, digests = job.settings, read_digests(folder.path)
    shard = blocks(len(job.prompts), settings.batch_size, settings.shard.index, settings.shard.count)
    missing = _find_missing(job, folder, shard)
    draw_chunk = partial(_draw_or_none_if_oom, job, cache, budget)
    total, absent = sum(map(len, shard)), sum(map(len, missing))
    limit = settings.batch_size
    with (
        make_bar(total=total, initial=total - absent, desc=folder.path.name, unit="prompt") as bar,
        working_beside(max_=2) as save,  # saving a block, and ending its claim
    ):
        for wait in (False, True)[: 1 + job.wait_for_others]:
            refused = []
            for block in missing:
                path = folder.place(f"block-{block.start}-{block.stop}")
                with ExitStack() as claims:
                    if not claims.enter_context(claim(path, wait=wait, lapse=settings.work.lapse)):
                        refused.append(block)
                        continue
                    if difference := describe_difference(read_digests(folder.path), digests):
                        raise ConfigError(f"{folder.path}: restarted by a process with {difference}")
                    if len(folder.samples(block)) < len(block):
                        with job.around_block(folder.path, block):
                            limit = _generate_block(draw_chunk, folder, block, limit, save)
                        save(claims.pop_all().close)
                bar.update(len(block))
            missing = refused
    return folder.is_whole(len(job.prompts), read=job.is_leader)


def _find_missing(job: Job, folder: RunFolder, shard: list[range]) -> list[range]:
    """Return the blocks that lack samples.

    Hundreds of workers may share a run. A job that does not wait therefore reads samples, which shows whether they are
    damaged, only if all are recorded.
    """

    def find(known: Mapping[int, object]) -> list[range]:
        return [block for block in shard if any(index not in known for index in block)]

    return (not job.wait_for_others and find(folder.recorded())) or find(folder.samples())


def _generate_block(
    draw_chunk: Callable[[range], Batch | None],
    folder: RunFolder,
    block: range,
    limit: int,
    save: Callable[[Work], None],
) -> int:
    """Generate a block, at most `limit` prompts at a time; return the number of prompts that fit in memory.

    Each chunk is passed to `save`, which may save it later, but in order.
    """
    start = block.start
    while start < block.stop:
        chunk = range(start, min(start + limit, block.stop))
        batch = draw_chunk(chunk)
        if batch is None:
            limit = len(chunk) // 2
            log.warning("out of memory with %d prompts: continuing with %d at a time", len(chunk), limit)
            continue
        save(partial(_save, folder, batch))
        start = chunk.stop
    return limit


def _save(folder: RunFolder, batch: Batch) -> None:
    # Retention first: a block whose samples exist is not generated again.
    if batch.retention is not None:
        folder.write(RETENTION, batch.retention.to_json())
    folder.add(batch.records, batch.outputs)


def _draw_or_none_if_oom(job: Job, cache: KVCache, budget: Budget, chunk: range) -> Batch | None:
    """Return the samples of some prompts; None if memory may suffice for fewer prompts.

    If memory does not suffice for recorded graphs, the prompts are generated again without graphs, since fewer prompts
    at a time would be rounded differently. With several processes the error is raised: processes with enough
    memory would wait for the one without.
    """
    work = partial(draw, job, cache, budget, chunk)
    final = len(chunk) == 1 or job.model.processes.count > 1
    held: list[bool] = []

    def forget() -> None:
        held.append(cache.holds_recordings)
        cache.forget()

    if final and cache.repetitions is None:
        return work()
    batch = run_or_none_if_oom(work, forget)
    if batch is None and held == [True]:
        log.warning("out of memory for recorded graphs with %d prompts: continuing without", len(chunk))
        batch = None if final else run_or_none_if_oom(work, forget)
    return work() if batch is None and final else batch
