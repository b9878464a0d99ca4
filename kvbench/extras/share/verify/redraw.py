"""Samples that are generated again in their batches, and the comparison with stored samples and costs."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvbench.core.budget import Budget
from kvbench.core.files import read_bytes
from kvbench.eval.files.kinds import IMAGES, READINGS, SampleKind, find_kind
from kvbench.eval.files.pictures import open_picture
from kvbench.eval.files.samples import SampleSetError
from kvbench.extras.share.verify.verdict import Finding
from kvbench.forced.record import COLUMNS, ScoredText
from kvbench.runs.generate.batch import LEDGER_COSTS, Batch, draw, open_cache
from kvbench.runs.job import Job
from kvbench.runs.prepare import Calibrations, prepare_method
from kvbench.runs.record.costs import LAST_COSTS
from kvbench.runs.record.folder import RunFolder, RunName, SampleRecord

REMEASURED_COSTS = (*LEDGER_COSTS, *LAST_COSTS)
"""Costs that regenerated samples measure again."""
EXACT_COSTS = ("peak_tokens", "peak_bytes", "sequence_bytes", *LAST_COSTS)
"""Costs that depend on row lengths only, on any machine."""
ARITHMETIC_FIELDS = ("least_share", "longest", "utilisation", "lse_drift", "protected_drops", "steps")
"""Other fields of a record, which are equal in the same arithmetic."""
MAX_NATS = 1e-2
"""Maximum mean change of a text's divergence and log-probabilities in another arithmetic, in nats per token."""


class Rule(NamedTuple):
    """Rule of comparison.

    Attributes:
        exact: whether samples and costs must be the same, because the arithmetic is the same.
        from_shapes: whether row lengths follow from shapes, so that `EXACT_COSTS` must be the same in any arithmetic.
        min_psnr: minimum PSNR in dB of images that count as equal in another arithmetic.
        other_psnr: PSNR in dB below which images count as different; up to `min_psnr`, rounding may be the cause.
    """

    exact: bool
    from_shapes: bool = False
    min_psnr: float = 40.0
    other_psnr: float = 25.0

    def describe(self) -> str:
        """Return the rule of comparison in words."""
        return "same bytes" if self.exact else f"same peaks, PSNR of at least {self.min_psnr:g} dB"


def draw_again(
    job: Job, calibrations: Calibrations, budget: Budget, chunks: Sequence[range]
) -> Iterator[Batch]:
    """Yield the batches of some chunks of prompts.

    Under forced decoding the texts are first scored again under the full cache.

    Args:
        job: the run, with a loaded model and a prepared method; its `runs_dir` is empty except for calibrations.
        calibrations: calibrations of the job.
        budget: budget of the prepared method.
        chunks: indices of the prompts of each batch.
    """
    if job.reads and not job.is_reference:
        full, none = job.reference, Calibrations()
        folder = RunFolder(
            job.settings.runs_dir, job.model.name, RunName("full", "again"), kind=find_kind(job.model.output)
        )
        for batch in draw_again(full, none, prepare_method(full, None), chunks):
            folder.add(batch.records, batch.outputs)
        job = replace(job, full_pass=folder.path)
    cache = open_cache(job, calibrations.codebooks)
    for chunk in chunks:
        yield draw(job, cache, budget, chunk)


def compare_batch(
    batch: Batch, folder: Path, kind: SampleKind, records: Mapping[int, SampleRecord], rule: Rule
) -> Iterator[Finding]:
    """Yield a finding for each sample and each cost of a batch that differs from the run's folder."""
    for record, output in zip(batch.records, batch.outputs, strict=True):
        index = int(str(record["index"]))
        if (stored := records.get(index)) is None:  # `check_samples` has reported the missing record
            continue
        if stored.get("batch") != record["batch"]:
            text = (
                f"was drawn in a batch of {stored.get('batch')!r:.20}, which the configuration does not give"
            )
            yield Finding(f"sample {index}", text, True)
            continue
        said, missing = compare_sample(kind.find(folder, index), kind.encode(output), kind, rule)
        if said is not None:
            yield Finding(f"sample {index}", said, missing)
        drawn = {**record, **kind.describe(output)}
        for name in (*REMEASURED_COSTS, *(ARITHMETIC_FIELDS if rule.exact else ())):
            if (ours := drawn.get(name)) != (theirs := stored.get(name)):
                is_rounding = not (rule.exact or (rule.from_shapes and name in EXACT_COSTS))
                text = f"{name} is {theirs!r:.60}, measured again {ours!r:.60}"
                yield Finding(f"ledger of sample {index}", text, is_rounding)


def compare_sample(stored: Path, drawn: bytes, kind: SampleKind, rule: Rule) -> tuple[str | None, bool]:
    """Return how a stored sample differs from the new sample, None within the rule, and whether rounding may be why."""
    if not stored.is_file():
        return "has no file", False
    content = read_bytes(stored)
    if content == drawn:
        return None, False
    if kind is IMAGES:
        return _compare_images(stored, drawn, rule)
    if kind is READINGS:
        return _compare_readings(stored, drawn, exact=rule.exact), False
    pairs = enumerate(zip(content, drawn, strict=False))
    where = next((i for i, (a, b) in pairs if a != b), min(len(content), len(drawn)))
    return f"differs from byte {where} on, of {len(content)}", not rule.exact


def _compare_images(stored: Path, drawn: bytes, rule: Rule) -> tuple[str | None, bool]:
    """Return by how much two images differ, None within the rule, and whether rounding may be the cause.

    The stored file is a stranger's: it is decoded only if its header is a PNG's of the new image's size.
    """
    try:
        with open_picture(stored, drawn) as right, open_picture(stored) as image:
            if image.format != "PNG":
                return f"is a file of {image.format}, not of PNG", False
            if image.size != right.size:
                sizes = [f"{width} x {height}" for width, height in (image.size, right.size)]
                return f"is {sizes[0]} pixels, drawn again {sizes[1]}", False
            ours, theirs = (np.asarray(side.convert("RGB"), np.int16) for side in (right, image))
    except SampleSetError as error:
        return str(error).removeprefix(f"{stored} "), False
    difference = np.abs(ours - theirs)
    if not difference.any():
        return None, False
    psnr = float(10 * np.log10(255**2 / np.mean(np.square(difference, dtype=np.float64))))
    if not rule.exact and psnr >= rule.min_psnr:
        return None, False
    share = float(difference.any(-1).mean())
    said = f"{share:.1%} of its pixels differ, by {difference.max()} at most, PSNR {psnr:.1f} dB"
    return said, not rule.exact and psnr >= rule.other_psnr


def _compare_readings(stored: Path, drawn: bytes, *, exact: bool) -> str | None:
    """Return by how much the stored scores of a text differ from new scores; None within the rule.

    Hidden states of the full cache do not count, because published files lack them. Unless `exact`, divergence and
    log-probabilities may differ by `MAX_NATS`.
    """
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(drawn)
        file.flush()
        ours, theirs = ScoredText.read(Path(file.name)), ScoredText.read(stored)
    if not np.array_equal(ours.tokens, theirs.tokens):
        return "belongs to another text"
    names = COLUMNS if exact else ("kl", "nll", "nll_full")
    columns = ((getattr(ours, name), getattr(theirs, name)) for name in names)
    changes = [float(np.mean(np.abs(a - b, dtype=np.float64))) for a, b in columns]
    worst = int(np.argmax(changes))  # NaN, if there is one
    within = changes[worst] <= (0.0 if exact else MAX_NATS)
    return None if within else f"{names[worst]} differs by {changes[worst]:.3g} a token"
