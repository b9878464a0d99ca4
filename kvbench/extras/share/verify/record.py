"""Checks of a run's record against its configuration, and against code, weights and arithmetic of this machine."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kvbench.core.budget import Budget
from kvbench.core.files import hash_values, parse_json, read_text
from kvbench.data.publication import SAMPLES_FILE
from kvbench.eval.protocol.records import read_fields
from kvbench.extras.share.verify.verdict import Finding
from kvbench.runs.code import describe_classes, describe_code, read_pins
from kvbench.runs.job import Job
from kvbench.runs.job_identity import identify
from kvbench.runs.prepare import Calibrations
from kvbench.runs.record.code_file import FILE as CODE_FILE
from kvbench.runs.record.code_file import SHOWN, list_changed
from kvbench.runs.record.costs import Cost, summarise_latency, summarise_memory
from kvbench.runs.record.folder import RECORDS, RunName, SampleRecord
from kvbench.runs.record.origins import list_origins
from kvbench.runs.record.provenance import describe_arithmetic, provenance
from kvbench.runs.record.results import FILE, Results

TOLERANCE = 1e-6
"""Maximum relative difference of two numbers that count as equal."""


def check_samples(
    job: Job, records: Mapping[int, SampleRecord], rows: Mapping[int, SampleRecord] | None, count: int
) -> Iterator[Finding]:
    """Yield a finding for a number of samples, a prompt or a seed that differs from the configuration.

    `rows` are the published values of each sample; None for a run that is not published. No finding quotes a prompt of
    the configuration: it may be a line of any local file that a stranger's run names.
    """
    if count != len(job.prompts):
        text = f"counts {count} samples, the configuration gives {len(job.prompts)} prompts"
        yield Finding(FILE, text)
        return
    given = {prompt.index: (prompt.text, job.settings.seed) for prompt in job.prompts}
    for source, samples in ((RECORDS, records), (SAMPLES_FILE.as_posix(), rows)):
        known = {
            index: (sample.get("prompt"), sample.get("seed")) for index, sample in (samples or {}).items()
        }
        if samples is not None and known.keys() != given.keys():
            yield Finding(source, f"its {len(known)} samples are not samples 0 to {count - 1}")
        if wrong := [index for index in known if index in given and known[index] != given[index]]:
            text = f"has another prompt or seed in {source} than the configuration gives"
            yield Finding(f"sample {min(wrong)}", text)


def check_summary(
    job: Job, records: Mapping[int, SampleRecord], budget: Budget, results: Results
) -> Iterator[Finding]:
    """Yield a finding for each field of memory and time in results.json that differs from the records."""
    try:
        costs = [read_fields(Cost, record) for _, record in sorted(records.items())]
    except ValueError as error:
        yield Finding(RECORDS, f"damaged ({error})")
        return
    memory = summarise_memory(costs, job.model.spec, budget, job.cache_plan.dtype.itemsize)
    for part, ours in (("memory", asdict(memory)), ("latency", asdict(summarise_latency(costs)))):
        theirs = asdict(getattr(results, part))
        for name, value in ours.items():
            if not is_close(value, theirs[name]):
                yield Finding(f"{part}.{name}", f"is {theirs[name]!r}, the records give {value!r}")


def is_close(one: object, other: object, tolerance: float = TOLERANCE) -> bool:
    """Return whether two JSON values are equal, numbers within a relative tolerance."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(
            is_close(a, b, tolerance) for a, b in zip(one, other, strict=True)
        )
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other)):
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-12)  # type: ignore[arg-type]
    return one == other


def check_weights(job: Job, recorded: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding if the loaded weights differ from the recorded weights."""
    known, here = (str(sha256)[:12] for sha256 in (recorded.get("weights_sha256"), job.model.weights_sha256))
    if recorded.get("weights_sha256") != job.model.weights_sha256:
        yield Finding("weights", f"the record has SHA-256 {known}, the weights here {here}", True)


def check_code(job: Job, recorded: Mapping[str, Any], folder: Path) -> Iterator[Finding]:
    """Yield a finding if code.json is missing or damaged, or if classes or files of kvbench here differ."""
    try:
        record = parse_json(read_text(folder / CODE_FILE))
        files = {part: dict(record[part]["files"]) for part in job.classes}
        sound = all(hash_values(files[part]) == record[part]["sha256"] for part in files)
        revisions = {
            name: one["revision"] for part in job.classes for name, one in recorded["classes"][part].items()
        }
    except OSError:
        yield Finding(CODE_FILE, "is missing")
        return
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        sound = False
    if not sound:
        yield Finding(CODE_FILE, "is damaged, or provenance has no revisions of its classes")
        return
    here: dict[str, Any] = {
        name: one for classes in job.classes.values() for name, one in describe_classes(classes).items()
    }
    changed = [name for name, one in here.items() if revisions.get(name) != one["revision"]]
    for part, classes in job.classes.items():
        changed += list_changed(files[part], describe_code(classes).files, read_pins().modules)
    if names := list(dict.fromkeys(changed)):
        more = f" and {len(names) - SHOWN} more" if names[SHOWN:] else ""
        yield Finding("code", f"differs here from the run's: {', '.join(names[:SHOWN])}{more}", True)


def check_name(job: Job, calibrations: Calibrations, results: Results, name: str) -> Iterator[Finding]:
    """Yield findings if folder, results.json and this code name the run or its reference differently."""
    ours = identify(job, calibrations)
    if RunName.of(name) != (ours.label, ours.hash) or results.run != name:
        text = f"the folder is called {name}, {FILE} is of {results.run:.80}, and the configuration gives"
        yield Finding("name", f"{text} {ours.label}-{ours.hash}")
    reference, given = results.reference, None
    if not job.is_reference:
        full = identify(job.reference, Calibrations())
        given = f"{full.label}-{full.hash}"
    if reference != given:
        yield Finding("reference", f"is {reference!s:.80}, the configuration gives {given}")


def use_threads(recorded: Mapping[str, Any]) -> None:
    """Compute with the recorded number of threads if this machine has as many processors."""
    threads = recorded.get("threads")
    if type(threads) is int and 1 <= threads <= (os.cpu_count() or 1):
        torch.set_num_threads(threads)


def list_differences(job: Job, recorded: Mapping[str, Any]) -> list[str]:
    """Return the names of differences between a run's recorded arithmetic and the arithmetic of this machine.

    Compared are the type of the device, its name, the number of threads on a CPU, the versions of torch and NumPy, and
    the settings of matrix products and attention. A missing record counts as different.
    """
    device, plan = job.settings.device, job.cache_plan
    here = _describe_machine(provenance(device, plan.graph_obstacle))
    arithmetic = json.loads(json.dumps(describe_arithmetic(device, job.model.spec.head_dim, plan.dtype)))
    origins = [_describe_machine(origin) for origin in list_origins(recorded)] or [{}]
    differing = [name for name in here if any(origin.get(name) != here[name] for origin in origins)]
    return differing + ["arithmetic"] * (recorded.get("arithmetic") != arithmetic)


def _describe_machine(origin: Mapping[str, Any]) -> dict[str, object]:
    """Return the parts of a provenance that decide rounding; a CPU's name is without its number of threads."""
    kind = str(origin.get("device")).partition(":")[0]
    name, comma, threads = str(origin.get("machine")).rpartition(", ")
    versions = origin.get("versions")
    return {
        "device": kind,
        "machine": name if comma and threads.endswith("threads") else str(origin.get("machine")),
        "threads": origin.get("threads") if kind == "cpu" else None,
        **{
            name: versions.get(name) if isinstance(versions, Mapping) else None for name in ("torch", "numpy")
        },
    }
