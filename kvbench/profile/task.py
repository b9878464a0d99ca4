"""`task=profile`: time, memory and phases of generation over batch sizes, for the method and the full cache.

Contents of `<runs_dir>/profile/<model>-<method>-<budget>-<hash>.json` (schema 1), written after every batch size:

    schema, status          1; `running` until everything is measured, then `done`
    model, method, budget   names; budget is {unit, fraction, tokens, bytes}: b and B per sequence; bytes is null for
                            a token budget
    weights, parameters     `files` or `random`; of transformer and tokenizer
    calibration             origin of the method's calibration; null if it needs none
    config, provenance      the whole configuration; `kvbench.runs.record.provenance.provenance`
    cache_dtype             of stored keys and values
    rows[]                  per batch size and cache:
      batch, cache          prompts at a time; name of the method (`full` for the full cache)
      status                `ok`; `out of memory`, or `left out` (a smaller batch was): unmeasured fields are missing
      first_seconds         the first generation, which builds the schedule and compiles kernels
      latency               {median, p10, p90, seconds[]} of one batch
      seconds_per_image, images_per_second, tokens_per_second, ratio_to_full (of medians; null without the full cache);
                            tokens_per_second counts generated tokens, without prompts and guidance
      kv                    {peak_tokens, peak_bytes, rebuild_bytes, transient_bytes, state_bytes} of the ledger,
                            read_bytes of attention from the cache, full_bytes and budget_bytes of the batch,
                            peak_of_full, peak_of_budget
      allocator             {before_bytes, peak_bytes, reserved_bytes} on a GPU: in use before a generation, peak, and
                            peak reserved, of three generations with CUDA graphs (the second records); else null
      attention             [{path, segments[], calls, others{path: reason}}]: attention paths of a generation
      phases                {seconds{text, recorded, transformer, cache, decode, rest}, total}: a separate generation,
                            run as for latencies; `recorded` is what CUDA graphs replay
      phases_by_launches    phases by launches, which separate transformer and cache; null without CUDA graphs
    largest                 {cache: prompts} that fit the GPU; null if not requested
    operators               [{name, calls, self_seconds}] of one traced batch of the method; null if not requested
"""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from kvbench.core.bars import make_bar
from kvbench.core.budget import Budget
from kvbench.core.files import hash_values, parse_json, read_text, write_whole
from kvbench.engine.memory import cache_bytes
from kvbench.methods.full import Full
from kvbench.methods.shared.calibration import Artifact, Observer
from kvbench.models.files.checkpoints import WeightsError
from kvbench.profile.bench import Bench, Candidate, ProfileRow, find_largest
from kvbench.profile.trace import trace
from kvbench.runs.calibrate import load_artifact
from kvbench.runs.check import check_job
from kvbench.runs.job import Job
from kvbench.runs.job_identity import describe_dtype, make_label
from kvbench.runs.prepare import locate_calibration, prepare_method
from kvbench.runs.record.provenance import provenance

SCHEMA_VERSION = 1
SHARED_PROVENANCE = ("code", "versions", "machine", "cuda_graph")
"""Entries of provenance that must be equal for a finished file to be used again."""
RANDOM_CALIBRATION = "random numbers (timing only)"


def announce(job: Job) -> str:
    """Return a line about the model and its full cache, from shapes alone."""
    spec, dtype = job.model.spec, job.cache_plan.dtype
    max_batch = max(job.settings.profile.batch_sizes)
    cache = cache_bytes(spec.full_tokens, spec, max_batch, dtype.itemsize) / 2**30
    random = " (random weights)" if job.section("model").get("weights") == "random" else ""
    parameters = job.model.parameters
    return (
        f"{job.model.name}{random}: {parameters / 1e6:,.1f} million parameters, {4 * parameters / 2**30:.2f} GiB in "
        f"float32; full cache at batch {max_batch}: {cache:.2f} GiB in {str(dtype).removeprefix('torch.')}"
    )


def profile(job: Job) -> tuple[Path, ProfileRow]:
    """Measure as the `profile` settings say; write the file, and return its path and contents.

    Raises:
        ConfigError, ValueError: settings are invalid (raised before weights are loaded).
        WeightsError: weights are missing or unreadable.
    """
    settings = job.settings.profile
    _load(job)
    candidates, calibration = _prepare_candidates(job)
    contents = _describe(job, calibration, candidates[0].budget)
    rows: list[ProfileRow] = []
    contents |= {"rows": rows, "largest": None, "operators": None}
    path = _name_file(job)

    def save(status: str) -> None:
        write_whole(path, json.dumps({**contents, "status": status}, indent=1))

    sizes = sorted(set(settings.batch_sizes))
    too_large: set[str] = set()
    bench = Bench(job, lambda: bar.update())
    generations = len(candidates) * (settings.warmup + settings.repeats + 2 + bench.more_generations)
    with make_bar(total=generations * len(sizes), desc="profile", unit="batch") as bar:
        for index, batch in enumerate(sizes, 1):
            rows += bench.measure(candidates, batch, too_large)
            save("running")
            bar.update(index * generations - bar.n)
        if settings.largest:
            contents["largest"] = {
                c.name: _search_largest(bench, c, _find_max_batch(rows, c.name), bar) for c in candidates
            }
            save("running")
    mine = candidates[0]
    if settings.trace is not None and (batch := _find_max_batch(rows, mine.name)):
        path_of_trace = Path(settings.trace).expanduser()
        path_of_trace.parent.mkdir(parents=True, exist_ok=True)
        contents["operators"] = trace(bench.make_generation(mine, batch), path_of_trace, job.settings.device)
    save("done")
    return path, {**contents, "status": "done"}


def find_measured(job: Job) -> Path | None:
    """Return the finished file of a job, measured by the same code on the same machine; None if there is none."""
    path, now = _name_file(job), provenance(job.settings.device, job.cache_plan.graph_obstacle)
    try:
        contents = parse_json(read_text(path))
        then = {name: contents["provenance"][name] for name in SHARED_PROVENANCE}
        is_done = contents["status"] == "done" and then == {name: now[name] for name in SHARED_PROVENANCE}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return path if is_done else None


def _name_file(job: Job) -> Path:
    return job.settings.runs_dir / "profile" / f"{job.model.name}-{make_label(job)}-{_hash_job(job)}.json"


def _search_largest(bench: Bench, candidate: Candidate, known: int, bar: "tqdm[object]") -> int:
    def fits(batch: int) -> bool:
        bar.set_description(f"largest batch, {candidate.name}: {batch}")
        return bench.fits(candidate, batch)

    return find_largest(fits, known)


def _load(job: Job) -> None:
    check_job(job)
    try:
        job.model.load(job.settings.device)
    except WeightsError as error:
        raise WeightsError(f"{error}; to time the model without weights, set model.weights=random") from None


def _prepare_candidates(job: Job) -> tuple[list[Candidate], str | None]:
    packing = job.cache_plan.packing
    artifact, origin = _find_calibration(job, job.method.needs())
    budget = prepare_method(job, artifact)
    static, _ = _find_calibration(job, job.cache_plan.codebooks)
    codebooks = None if static is None else static.tensors
    suffix = f", {job.settings.cache_dtype}" if isinstance(job.method, Full) and packing is not None else ""
    candidates = [Candidate(job.method_name + suffix, job.method, budget, packing, codebooks)]
    if job.settings.profile.against_full and not job.is_reference:
        candidates.append(Candidate("full", job.reference.method, prepare_method(job.reference, None)))
    return candidates, origin


def _find_calibration(job: Job, needs: Observer | Path | None) -> tuple[Artifact | None, str | None]:
    """Return a calibration and its origin; random values if its file is missing or weights are random."""
    if not isinstance(needs, Observer):
        return None, None if needs is None else str(needs)
    path, metadata = locate_calibration(job, needs)
    if job.section("model").get("weights") != "random" and path.is_file():
        return load_artifact(path, needs.kind, metadata), str(path)
    return needs.make_random_artifact(job.model.spec), RANDOM_CALIBRATION


def _describe(job: Job, calibration: str | None, budget: Budget) -> dict[str, object]:
    return {
        "schema": SCHEMA_VERSION,
        "model": job.model.name,
        "method": job.method_name,
        "budget": {
            "unit": budget.unit,
            "fraction": float(budget.share),
            "tokens": float(budget.capacity),
            "bytes": None if budget.bytes is None else float(budget.bytes),
        },
        "weights": job.section("model").get("weights", "files"),
        "parameters": job.model.parameters,
        "calibration": calibration,
        "cache_dtype": describe_dtype(job).removeprefix("torch."),
        "config": job.config,
        "provenance": provenance(job.settings.device, job.cache_plan.graph_obstacle),
    }


def _hash_job(job: Job) -> str:
    packing = job.cache_plan.packing
    values = [
        job.model_settings,
        job.section("method"),
        job.budget.exact,
        asdict(job.settings.profile),
        job.settings.device,
        job.cache_plan.graph_obstacle is None,
        job.settings.batch_invariant,
        job.settings.noise,
        describe_dtype(job),
        None if packing is None else asdict(packing),
        torch.get_num_threads(),
        job.prompts_sha256,
    ]
    return hash_values(values)[:10]


def _find_max_batch(rows: list[ProfileRow], name: str) -> int:
    """Return the largest measured batch of a cache; 0 if none was measured."""
    return max((int(str(r["batch"])) for r in rows if r["cache"] == name and r["status"] == "ok"), default=0)
