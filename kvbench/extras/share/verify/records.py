"""Checks of a run's records against its files, its prompts and its summary; nothing is drawn."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from kvbench.core.budget import Budget
from kvbench.core.files import hash_path
from kvbench.eval.files.kinds import SampleKind
from kvbench.eval.protocol.records import read_fields
from kvbench.extras.share.verify.verdict import Finding
from kvbench.runs.job import Job
from kvbench.runs.record.costs import Cost, summarise_latency, summarise_memory
from kvbench.runs.record.folder import SampleRecord
from kvbench.runs.record.results import Results

CLOSE = 1e-6
"""Relative difference of two numbers that count as equal."""


def check_samples(
    folder: Path, kind: SampleKind, records: Mapping[int, SampleRecord], count: int
) -> Iterator[Finding]:
    """Yield a finding for each sample that is missing, or whose file is not the recorded one."""
    for index in sorted({*range(count), *records}):
        path = kind.find(folder, index)
        if index not in records:
            yield Finding(f"sample {index}", "has no record")
        elif index >= count:
            yield Finding(f"sample {index}", f"is recorded, and results.json counts {count} samples")
        elif not path.is_file():
            yield Finding(f"sample {index}", "has no file")
        elif hash_path(path) != records[index]["sha256"]:
            yield Finding(f"sample {index}", "its file has another SHA-256 than its record")


def check_prompts(job: Job, records: Mapping[int, SampleRecord], count: int) -> Iterator[Finding]:
    """Yield a finding for each record of another prompt or seed than the configuration gives, and another number.

    No finding repeats a prompt of the configuration: it may be a line of any file here that a stranger's run names.
    """
    if count != len(job.prompts):
        text = f"counts {count} samples, the configuration gives {len(job.prompts)} prompts"
        yield Finding("results.json", text)
    for prompt in job.prompts:
        record = records.get(prompt.index, {})
        for name, value, known in (
            ("prompt", prompt.text, "the one of the configuration"),
            ("seed", job.settings.seed, str(job.settings.seed)),
        ):
            if record and record.get(name) != value:
                yield Finding(
                    f"sample {prompt.index}", f"its {name} is {record.get(name)!r:.60}, not {known}"
                )


def check_summary(
    job: Job, records: Mapping[int, SampleRecord], budget: Budget, results: Results
) -> Iterator[Finding]:
    """Yield a finding for each figure of memory and time in results.json that the records do not give."""
    try:
        costs = [read_fields(Cost, record) for _, record in sorted(records.items())]
    except ValueError as error:
        yield Finding("samples.jsonl", f"damaged ({error})")
        return
    memory = summarise_memory(costs, job.model.spec, budget, job.cache_plan.dtype.itemsize)
    latency = summarise_latency(costs)
    for part, given, known in (("memory", memory, results.memory), ("latency", latency, results.latency)):
        ours, theirs = asdict(given), asdict(known)  # type: ignore[call-overload]
        for name, value in ours.items():
            if not is_close(value, theirs[name]):
                yield Finding(f"{part}.{name}", f"is {theirs[name]!r}, the records give {value!r}")


def is_close(one: object, other: object, tolerance: float = CLOSE) -> bool:
    """Return whether two JSON values are equal, numbers within a relative tolerance."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(
            is_close(a, b, tolerance) for a, b in zip(one, other, strict=True)
        )
    is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other))
    if is_number:
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-12)  # type: ignore[arg-type]
    return one == other
