"""Samples that are drawn again in their batches, and their comparison with the stored ones and their costs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvbench.core.budget import Budget
from kvbench.core.files import hash_content, read_bytes
from kvbench.eval.files.kinds import IMAGES, READINGS, SampleKind, find_kind
from kvbench.eval.files.pictures import open_picture
from kvbench.eval.files.samples import SampleSetError
from kvbench.extras.share.verify.readings import compare_readings
from kvbench.extras.share.verify.verdict import Finding
from kvbench.runs.generate.batch import LEDGER_COSTS, Batch, draw, open_cache
from kvbench.runs.job import Job
from kvbench.runs.prepare import Calibrations, prepare_method
from kvbench.runs.record.costs import LAST_COSTS
from kvbench.runs.record.folder import RunFolder, RunName, SampleRecord

PEAKS = (*LEDGER_COSTS, *LAST_COSTS)
"""Costs that are measured again."""
MEASURED = (*PEAKS, "batch", "least_share", "longest", "utilisation", "lse_drift", "protected_drops", "steps")
"""Fields of a record that the same arithmetic repeats."""


class Rule(NamedTuple):
    """Rule of comparison.

    Attributes:
        exact: whether samples must be equal and costs the same.
        min_psnr: least PSNR of an equal image otherwise, in dB.
        other_psnr: PSNR below which an image is another one; between the two, rounding may be the cause.
        max_change: largest relative change of a peak otherwise.
    """

    exact: bool
    min_psnr: float = 40.0
    other_psnr: float = 25.0
    max_change: float = 0.05

    def describe(self) -> str:
        """Return the rule in words."""
        if self.exact:
            return "same bytes"
        return f"PSNR of at least {self.min_psnr:g} dB, peaks within {self.max_change:.0%}"


def find_batch(records: Mapping[int, SampleRecord], index: int, size: int, count: int) -> range | None:
    """Return the block in which a sample was drawn; None if its records have smaller batches, after out of memory.

    Args:
        records: of the run.
        index: of the sample.
        size: of blocks.
        count: number of prompts.

    >>> records = {i: {"batch": 2 if i < 4 else 1} for i in range(5)}
    >>> find_batch(records, 3, 2, 5), find_batch(records, 4, 2, 5), find_batch(records, 0, 4, 5)
    (range(2, 4), range(4, 5), None)
    """
    first = index // size * size
    block = range(first, min(first + size, count))
    is_whole = all(records[other].get("batch") == len(block) for other in block if other in records)
    return block if is_whole else None


def draw_again(
    job: Job, calibrations: Calibrations, budget: Budget, chunks: Sequence[range]
) -> Iterator[Batch]:
    """Yield the batches of some chunks of prompts; the model is loaded, the method prepared.

    A reading is compared with the full cache's, which is read again first.

    Args:
        job: the run; its `runs_dir` is empty but for calibrations.
        calibrations: of the job.
        budget: of the prepared method.
        chunks: prompts that were drawn together.
    """
    if job.reads and not job.is_reference:
        full, none = job.reference, Calibrations()
        folder = RunFolder(
            job.settings.runs_dir, job.model.name, RunName("full", "again"), kind=find_kind(job.model.output)
        )
        for batch in draw_again(full, none, prepare_method(full, None), chunks):
            folder.add(batch.records, batch.outputs)
        job = replace(job, full_pass=folder.path)
    cache = open_cache(job, calibrations.books)
    for chunk in chunks:
        yield draw(job, cache, budget, chunk)


def compare_batch(
    batch: Batch, folder: Path, kind: SampleKind, records: Mapping[int, SampleRecord], rule: Rule
) -> Iterator[Finding]:
    """Yield a finding for each sample and each cost of a batch that the run's folder has otherwise."""
    for record, output in zip(batch.records, batch.outputs, strict=True):
        index = int(str(record["index"]))
        if index not in records:  # `check_samples` has found it
            continue
        drawn = {**record, **kind.describe(output)}
        stored = kind.find(folder, index)
        content = kind.encode(output)
        said, missing = None, False
        if stored.is_file() and hash_content(content) != records[index]["sha256"]:
            said, missing = _compare_sample(stored, content, kind, rule)
        if said is not None:
            yield Finding(f"sample {index}", said, missing)
        if said is None or rule.exact:
            yield from _compare_costs(drawn, records[index], rule)


def _compare_sample(stored: Path, drawn: bytes, kind: SampleKind, rule: Rule) -> tuple[str | None, bool]:
    """Return how a stored sample differs from the drawn one, None within the rule, and whether that proves nothing."""
    if kind is IMAGES:
        return _compare_images(stored, drawn, rule)
    if kind is READINGS:
        return compare_readings(stored, drawn, exact=rule.exact), False
    content = read_bytes(stored)
    if content == drawn:
        return None, False
    position = next((i for i, (a, b) in enumerate(zip(content, drawn, strict=False)) if a != b), None)
    where = min(len(content), len(drawn)) if position is None else position
    return f"differs from byte {where} on, of {len(content)}", not rule.exact


def _compare_images(stored: Path, drawn: bytes, rule: Rule) -> tuple[str | None, bool]:
    """Return by how much two images differ, None within the rule, and whether rounding may be the cause.

    The stored one is a stranger's: it is decoded only if its header is of a PNG file of the drawn one's size.
    """
    try:
        with open_picture(stored, drawn) as right, open_picture(stored) as image:
            if image.format != "PNG":
                return f"is a file of {image.format}, not of PNG", False
            if image.size != right.size:
                sizes = [f"{width} x {height}" for width, height in (image.size, right.size)]
                return f"is {sizes[0]} pixels, drawn again {sizes[1]}", False
            ours, theirs = (np.asarray(one.convert("RGB"), np.int16) for one in (right, image))
    except SampleSetError as error:
        return str(error).removeprefix(f"{stored} "), False
    difference = np.abs(ours - theirs)
    if not difference.any():
        return None, False
    psnr = float(10 * np.log10(255**2 / np.mean(np.square(difference, dtype=np.float64))))
    if not rule.exact and psnr >= rule.min_psnr:
        return None, False
    may_be_rounding = not rule.exact and psnr >= rule.other_psnr
    share = float(difference.any(-1).mean())
    said = f"{share:.1%} of its pixels differ, by {difference.max()} at most, PSNR {psnr:.1f} dB"
    return said, may_be_rounding


def _compare_costs(drawn: SampleRecord, stored: SampleRecord, rule: Rule) -> Iterator[Finding]:
    index = drawn["index"]
    for name in MEASURED if rule.exact else PEAKS:
        ours, theirs = drawn.get(name), stored.get(name)
        if not _is_close(ours, theirs, rule):
            yield Finding(
                f"ledger of sample {index}", f"{name} is {theirs!r:.60}, measured again {ours!r:.60}"
            )


def _is_close(ours: object, theirs: object, rule: Rule) -> bool:
    if rule.exact or not (isinstance(ours, int | float) and isinstance(theirs, int | float)):
        return ours == theirs
    return abs(ours - theirs) <= rule.max_change * max(abs(ours), abs(theirs))
