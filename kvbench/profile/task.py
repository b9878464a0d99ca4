"""`task=profile`: time, memory and phases of generation over batch sizes, the full cache beside the method.

What is written to `<runs_dir>/profile/<model>-<method>-<budget>-<hash>.json` (schema 1), whole after every batch size:

    schema, status          1; `running` until everything is measured, then `done`
    model, method, budget   names; budget is {unit, fraction, tokens, bytes}: what it counts, b and B per sequence;
                            bytes is null unless it counts them
    weights, parameters     `files` or `random`; of transformer and tokenizer
    calibration             where the method's calibration came from, null if it needs none
    config, provenance      the whole configuration; code, versions, device, gpu, cpu, threads, start
    cache_dtype             of stored keys and values
    rows[]                  per batch size and cache:
      batch, cache          prompts at a time; name of the method (`full` for the full cache)
      status                `ok`, `out of memory`, or `left out` because a smaller batch was out of memory
      first_seconds         the first generation: tables of the schedule are made, kernels are compiled
      latency               {median, p10, p90, seconds[]} of one batch
      seconds_per_image, images_per_second, tokens_per_second, ratio_to_full (of medians; null without the full cache);
                            tokens are those of the images, without prompts and without a branch that guides
      kv                    {peak_tokens, peak_bytes, rebuild_bytes, transient_bytes, state_bytes} out of the ledger,
                            full_bytes and budget_bytes of such a batch, peak_of_full, peak_of_budget
      allocator             {before_bytes, peak_bytes, reserved_bytes} on a GPU: in use before a generation and at its
                            worst instant, and the most reserved; else null
      attention             [{path, segments[], calls, others{path: reason}}]: how a generation's attention was computed
      phases                {seconds{text, transformer, cache, decode, rest}, total}: one generation of its own
    largest                 {cache: prompts} that fit the GPU, null if not asked for
    operators               [{name, calls, self_seconds}] of one traced batch of the method, null if not asked for
"""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from kvbench.core.files import hash_values, write_whole
from kvbench.engine.memory import cache_bytes
from kvbench.engine.packed.bytes import prepare_to_fit
from kvbench.methods.full import Full
from kvbench.methods.shared.base import Artifact, Observer
from kvbench.models.files.checkpoints import WeightsError
from kvbench.profile.bench import Bench, Candidate, Row, find_largest
from kvbench.profile.trace import trace
from kvbench.runs.calibrate import load_artifact
from kvbench.runs.job import Job
from kvbench.runs.job_identity import describe_dtype, label_of
from kvbench.runs.prepare import calibration_file
from kvbench.runs.record.provenance import provenance

SCHEMA_VERSION = 1
RANDOM_CALIBRATION = "random numbers (timing only)"


def announce(job: Job) -> str:
    """Return one line on what is about to be built, from shapes alone."""
    spec, itemsize = job.model.spec, torch.empty((), dtype=job.dtype).element_size()
    max_batch = max(job.settings.profile.batch_sizes)
    cache = cache_bytes(spec.full_tokens, spec, max_batch, itemsize) / 2**30
    random = " (random weights)" if job.section("model").get("weights") == "random" else ""
    parameters = job.model.parameters
    return (
        f"{job.model.name}{random}: {parameters / 1e6:,.1f} million parameters, {4 * parameters / 2**30:.2f} GiB in "
        f"float32; full cache at batch {max_batch}: {cache:.2f} GiB in {str(job.dtype).removeprefix('torch.')}"
    )


def profile(job: Job) -> tuple[Path, Row]:
    """Measure what `profile` asks for, write it, and return the file and its contents.

    Raises:
        ConfigError, ValueError: settings that cannot work, before weights are loaded.
        WeightsError: weights are missing or unreadable.
    """
    settings = job.settings.profile
    _load(job)
    candidates, calibration = _prepare_contestants(job)
    found = _describe(job, calibration)
    rows: list[Row] = []
    found |= {"rows": rows, "largest": None, "operators": None}
    path = job.settings.runs_dir / "profile" / f"{job.model.name}-{label_of(job)}-{_hash_job(job)}.json"

    def save(status: str) -> None:
        write_whole(path, json.dumps({**found, "status": status}, indent=1))

    generations = len(candidates) * (settings.warmup + settings.repeats + 2)
    sizes = sorted(set(settings.batch_sizes))
    lacking: set[str] = set()
    with tqdm(total=generations * len(sizes), desc="profile", unit="batch") as bar:
        bench = Bench(job, bar.update)
        for number, batch in enumerate(sizes, 1):
            rows += bench.measure(candidates, batch, lacking)
            save("running")
            bar.update(number * generations - bar.n)
        if settings.largest:
            found["largest"] = {
                c.name: _search_largest(bench, c, _find_max_batch(rows, c.name), bar) for c in candidates
            }
            save("running")
    mine = candidates[0]
    if settings.trace is not None and (batch := _find_max_batch(rows, mine.name)):
        path_of_trace = Path(settings.trace).expanduser()
        found["operators"] = trace(bench.make_generation(mine, batch), path_of_trace, job.settings.device)
    save("done")
    return path, {**found, "status": "done"}


def _search_largest(bench: Bench, candidate: Candidate, known: int, bar: "tqdm[object]") -> int:
    def fits(batch: int) -> bool:
        bar.set_description(f"largest batch, {candidate.name}: {batch}")
        return bench.fits(candidate, batch)

    return find_largest(fits, known)


def _load(job: Job) -> None:
    job.check()
    try:
        job.model.load(job.settings.device)
    except WeightsError as error:
        raise WeightsError(
            f"{error}; model.weights=random fills the model with random numbers to time it"
        ) from None


def _prepare_contestants(job: Job) -> tuple[list[Candidate], str | None]:
    artifact, origin = _find_calibration(job, job.method.needs())
    prepare_to_fit(job.method, job.model.spec, job.allowance.requested, artifact, job.packing)
    books, _ = _find_calibration(job, job.codebooks)
    known = None if books is None else books.tensors
    stored = (
        f", {job.settings.cache_dtype}" if isinstance(job.method, Full) and job.packing is not None else ""
    )
    found = [Candidate(job.method_name + stored, job.method, job.allowance.final, job.packing, known)]
    if job.settings.profile.against_full and not job.reference:
        full = job.as_reference()
        full.method.prepare(full.model.spec, full.allowance.requested)
        found.append(Candidate("full", full.method, full.allowance.requested))
    return found, origin


def _find_calibration(job: Job, needs: Observer | Path | None) -> tuple[Artifact | None, str | None]:
    """Return what a run would calibrate, if it is there; random numbers otherwise, and for random weights."""
    if not isinstance(needs, Observer):
        return None, None if needs is None else str(needs)
    path, metadata = calibration_file(job, needs)
    if job.section("model").get("weights") != "random" and path.is_file():
        return load_artifact(path, needs.kind, metadata), str(path)
    return needs.make_stand_in(job.model.spec), RANDOM_CALIBRATION


def _describe(job: Job, calibration: str | None) -> dict[str, object]:
    budget = job.allowance.final
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
        "provenance": provenance(job.settings.device, job.graph_obstacle),
    }


def _hash_job(job: Job) -> str:
    values = [
        job.model_settings,
        job.section("method"),
        job.allowance.requested.exact,
        asdict(job.settings.profile),
        job.settings.device,
        job.graph_obstacle is None,
        *(["batch_invariant"] if job.settings.batch_invariant else []),
        describe_dtype(job),
        *([] if job.packing is None else [asdict(job.packing)]),
        torch.get_num_threads(),
        job.prompts_sha256,
    ]
    return hash_values(values)[:10]


def _find_max_batch(rows: list[Row], name: str) -> int:
    """Return the largest batch of a cache that was measured, 0 if none was."""
    return max((int(str(r["batch"])) for r in rows if r["cache"] == name and r["status"] == "ok"), default=0)
