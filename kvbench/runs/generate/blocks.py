"""Blocks of a run: prompts that one process claims, generates and saves together."""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

from tqdm import tqdm

from kvbench.core.background import Work, working_beside
from kvbench.core.claims import claim
from kvbench.core.devices import if_it_fits
from kvbench.engine.cache import KVCache
from kvbench.runs.generate.batch import Drawn, draw
from kvbench.runs.generate.retention import FILE as RETENTION
from kvbench.runs.job import Job
from kvbench.runs.record.folder import RunFolder, blocks

log = logging.getLogger(__name__)


def generate(job: Job, folder: RunFolder, cache: KVCache) -> bool:
    """Generate this shard's missing blocks; return whether every sample of the run exists.

    Processes that do the same take different blocks. At the end patient ones wait for each other's, and take over those
    of a process that died. Out of memory, a process goes on with half as many prompts at a time. A block is saved while
    the next one is drawn, and stays claimed until it is.

    Raises:
        Busy: the context of a block refuses it.
    """
    settings = job.settings
    shard = blocks(len(job.prompts), settings.batch_size, settings.shard.index, settings.shard.count)
    todo = _find_missing(job, folder, shard)
    total, absent = sum(map(len, shard)), sum(map(len, todo))
    limit = settings.batch_size
    title = folder.path.name
    with (
        tqdm(total=total, initial=total - absent, desc=title, unit="prompt", leave=None) as bar,
        working_beside(max_=2) as save,  # a block and the end of its claim
    ):
        for wait in (False, True)[: 1 + job.patient]:
            elsewhere = []
            for block in todo:
                place = folder.place(f"block-{block.start}-{block.stop}")
                with ExitStack() as claims:
                    if not claims.enter_context(claim(place, wait=wait, lapse=settings.work.lapse)):
                        elsewhere.append(block)
                        continue
                    if len(folder.samples(block)) < len(block):
                        with job.around_block(folder.path, block):
                            limit = _generate_block(job, folder, cache, block, limit, save)
                        save(claims.pop_all().close)
                bar.update(len(block))
            todo = elsewhere
    return folder.is_whole(len(job.prompts), read=job.leads)


def _find_missing(job: Job, folder: RunFolder, shard: list[range]) -> list[range]:
    """Return the blocks that lack samples.

    A job that waits for nobody may be one of hundreds at a run. It reads samples, which shows whether they are damaged,
    only where all are recorded.
    """

    def find(known: Mapping[int, object]) -> list[range]:
        return [block for block in shard if any(index not in known for index in block)]

    return (not job.patient and find(folder.recorded())) or find(folder.samples())


def _generate_block(
    job: Job, folder: RunFolder, cache: KVCache, block: range, limit: int, save: Callable[[Work], None]
) -> int:
    """Draw a block, at most `limit` prompts at a time, and return how many memory suffices for.

    What was drawn is given to `save`, which may save it later, but in order.
    """
    start = block.start
    while start < block.stop:
        part = range(start, min(start + limit, block.stop))
        drawn = _drawn_if_it_fits(job, cache, part)
        if drawn is None:
            limit = len(part) // 2
            log.warning("out of memory with %d prompts: going on with %d at a time", len(part), limit)
            continue
        save(partial(_save, folder, drawn))
        start = part.stop
    return limit


def _save(folder: RunFolder, drawn: Drawn) -> None:
    # Retention first: a block whose samples exist is not drawn again.
    if drawn.retention is not None:
        folder.write(RETENTION, drawn.retention.to_json())
    folder.add(drawn.records, drawn.made)


def _drawn_if_it_fits(job: Job, cache: KVCache, part: range) -> Drawn | None:
    """Return what was made of some prompts; None when memory may suffice for fewer of them only.

    Of several processes those that have memory would wait for the one that has not.
    """
    work = partial(draw, job, cache, part)
    final = len(part) == 1 or job.processes.count > 1
    return work() if final else if_it_fits(work, cache.forget)
