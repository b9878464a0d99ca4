"""Execution of one run: calibration, reference, samples, results."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import yaml
from tqdm import tqdm

from kvbench.core.background import Work, working_beside
from kvbench.core.config import ConfigError
from kvbench.core.devices import if_it_fits
from kvbench.core.files import hash_path, remove_unfinished
from kvbench.core.locks import claim
from kvbench.core.storage import CODE_DTYPES
from kvbench.engine.cache import KVCache
from kvbench.engine.coding.codebooks import Codebooks
from kvbench.engine.coding.formats import Books
from kvbench.engine.packed.bytes import prepare_to_fit
from kvbench.methods.base import ADDED, Artifact, Observer
from kvbench.methods.capabilities import ReadsCodebooks, mixes_precisions
from kvbench.prompts.base import hash_prompts
from kvbench.runs.calibrate import artifact_name, calibrate, load_artifact, save_artifact
from kvbench.runs.generate.batch import Drawn, draw, load, open_cache
from kvbench.runs.generate.retention import FILE as RETENTION
from kvbench.runs.identity import Identity
from kvbench.runs.job import Busy, Job
from kvbench.runs.record.folder import RunFolder, blocks, slug
from kvbench.runs.record.kinds import TEXTS, find_sample_kind
from kvbench.runs.record.merge import import_calibration, import_run
from kvbench.runs.record.provenance import describe_arithmetic, provenance
from kvbench.runs.record.results import FILE, Outcome, read_results
from kvbench.runs.score.finish import finish
from kvbench.runs.score.scoring import check_required, check_scored, find_pending

log = logging.getLogger(__name__)

Opened = Callable[[Path, int], object]
"""Callback for a run that begins: its folder, and its number of samples."""


def run(job: Job, opened: Opened | None = None) -> Outcome:
    """Complete a run, its reference and its calibration; what exists is reused.

    Args:
        job: the run.
        opened: called for the run and for its reference.

    Raises:
        ConfigError, ValueError, WeightsError, BudgetExceeded, NotFinite: see where they are defined; nothing that was
            finished is lost.
        Busy: another process calibrates, and the job does not wait.
    """
    _load(job)
    outcome = _complete(job.as_reference() if job.reference else job, opened)
    if job.logger is not None and outcome.results is not None:
        job.logger.send(outcome.folder, outcome.results, job.sweep)
    return _checked(job, outcome)


def rescore(job: Job) -> Outcome:
    """Add metrics to a finished run; nothing is generated.

    Raises:
        ConfigError: the run or its reference is not finished.
    """
    _load(job)
    for needed in (job.as_reference(), *(() if job.reference else (job,))):
        for used in (file_used(needed), books_used(needed)):
            if used is not None and not used.is_file():
                raise ConfigError(f"task=evaluate: {used} is missing; calibrate and generate with task=run")
        folder = _locate(needed, make=False)[0]
        if not folder.finished():
            raise ConfigError(
                f"task=evaluate: {folder.path} is not a finished run; generate it with task=run"
            )
    return _checked(job, _complete(job.as_reference() if job.reference else job))


def _checked(job: Job, outcome: Outcome) -> Outcome:
    if outcome.results is not None:
        # The reference has nothing to be compared with.
        named = [n for n in job.settings.require if not (job.reference and job.evaluators[n].needs_reference)]
        check_scored(job.evaluators, named, outcome.results)
    return outcome


def _load(job: Job) -> None:
    check_required(job.evaluators, job.settings.require)
    job.check()
    load(job)


def _complete(job: Job, opened: Opened | None = None) -> Outcome:
    folder = open_run(job)
    if opened is not None:
        opened(folder.path, len(job.prompts))
    known = read_results(folder.path)
    whole = len(folder.samples()) == len(job.prompts)
    todo = find_pending(job.evaluators, job.section("eval"), known)
    folder.note("running")
    if known is not None and whole and not todo:
        return Outcome(folder.path, known, reused=True)
    try:
        reference = None if job.reference else _complete(job.as_reference(), opened).folder
        whole = whole or generate(job, folder)
        if not whole or (reference is not None and not (reference / FILE).is_file()):
            return Outcome(folder.path, None)
        return Outcome(folder.path, finish(job, folder, reference))
    except Busy:  # others score it
        return Outcome(folder.path, None)
    except (Exception, KeyboardInterrupt) as error:
        stopped = isinstance(error, KeyboardInterrupt)
        with suppress(OSError):  # the disk may be what failed
            folder.note("interrupted" if stopped else f"failed: {' '.join(str(error).split())}")
        raise


def open_run(job: Job) -> RunFolder:
    """Prepare the method and open the folder that belongs to the job's identity.

    What describes the run is written unless it is there; a damaged configuration is written again, since any job of
    this identity describes the run.
    """
    folder, used = _locate(job, make=True)
    if not folder.finished():
        remove_unfinished(folder.path)
    if not (folder.path / "provenance.json").exists() and not (folder.path / "config.yaml").exists():
        hashes = {"weights_sha256": job.model.weights_sha256, "calibration_sha256": used}
        sources = {part: source.describe() for part, source in job.model.list_sources().items()}
        found = provenance(job.settings.device, job.graph_obstacle) | hashes | {"sources": sources}
        arithmetic = describe_arithmetic(job.settings.device, job.model.spec.head_dim, job.dtype)
        folder.write("provenance.json", json.dumps(found | {"arithmetic": arithmetic}, indent=1))
    if not _is_whole(folder.path / "config.yaml"):
        folder.write(
            "config.yaml", yaml.safe_dump(dict(job.config), sort_keys=False, default_flow_style=None)
        )
    return folder


def _locate(job: Job, *, make: bool) -> tuple[RunFolder, str | None]:
    """Prepare the method; return the job's folder and the SHA-256 of the calibration or file that the method uses."""
    used, needs = prepare_method(job), job.method.needs()
    given = str(needs) if isinstance(needs, Path) else object()  # where the file lies does not matter
    revised = {"revision": job.method.revision} if job.method.revision else {}
    identity = Identity(
        model=job.model_settings,
        weights=job.model.weights_sha256,
        method=identify_method(job.section("method"), given) | revised,
        calibration=used,
        budget=job.allowance.requested.exact,
        prompts=job.prompts_sha256,
        seed=job.settings.seed,
        cache_dtype=describe_dtype(job),
        label=label_of(job),
        bound=None if job.bounded is None else job.method_name,
        storage=_describe_storage(job),
        batch_invariant=job.settings.batch_invariant,
    )
    kind = find_sample_kind(job.model)
    if make:
        import_run(job.model.name, identity, job.settings.runs_dir, job.settings.runs_dirs)
    return RunFolder(job.settings.runs_dir, job.model.name, identity, kind=kind, make=make), used


def prepare_method(job: Job) -> str | None:
    """Calibrate and prepare a job's method; return the SHA-256 of the calibration or file that it uses.

    The model is loaded if anything is to be calibrated.
    """
    artifact, used = artifact_for(job)
    read_books(job)
    prepare_to_fit(job.method, job.shard_spec, job.allowance.shard, artifact, job.packing)
    return used


def identify_method(section: Mapping[str, object], given: object) -> dict[str, object]:
    """Return the settings by which an identity knows a method, without those that change nothing.

    Args:
        section: the method's part of the configuration.
        given: path of a calibration file, as a value of some setting; the file's contents are identified elsewhere.
    """
    return {
        key: value
        for key, value in section.items()
        if value != given and (key not in ADDED or value != ADDED[key])
    }


def _name_codes(job: Job) -> str:
    """Return the name of numbers of fewer than 16 bits; empty where others are stored, or a method's own forms."""
    name = job.settings.cache_dtype
    return name if name in CODE_DTYPES and not mixes_precisions(job.method) else ""


def describe_dtype(job: Job) -> str:
    """Return the dtype of stored keys and values; of numbers in few bits what the configuration calls them."""
    return _name_codes(job) or str(job.dtype)


def _describe_storage(job: Job) -> dict[str, object] | None:
    """Return how numbers of fewer than 16 bits are stored, as an identity has it; codebooks are there."""
    packing, used = job.packing, books_used(job)
    if packing is None:
        return None
    return {**asdict(packing.storage), "codebooks": None if used is None else hash_path(used)}


def _is_whole(path: Path) -> bool:
    """Return whether a YAML file is there and holds keys."""
    try:
        return isinstance(yaml.safe_load(path.read_bytes()), dict)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return False


def label_of(job: Job) -> str:
    """Return the readable start of a job's file names: method, budget, and the unit or dtype if not the default."""
    codes = _name_codes(job)
    stored = f"-{codes}" if codes else ""
    if not job.method.budgeted:
        return slug(job.method_name) + stored
    unit = "" if job.allowance.requested.unit == "tokens" else f"-{job.allowance.requested.unit}"
    return f"{slug(job.method_name)}-{float(job.allowance.requested.share):.4g}{unit}{stored}"


def artifact_for(job: Job) -> tuple[Artifact | None, str | None]:
    """Return the calibration a method needs, found or made, and the SHA-256 of the artifact or given file it uses."""
    needs = job.method.needs()
    artifact = observe(job, [needs])[0] if isinstance(needs, Observer) else None
    used = file_used(job)
    return artifact, None if used is None else hash_path(used)


def file_used(job: Job) -> Path | None:
    """Return the calibration or the given file that a job's method works with; the model is loaded."""
    needs = job.method.needs()
    return calibration_file(job, needs)[0] if isinstance(needs, Observer) else needs


def read_books(job: Job) -> Books | None:
    """Return the static codebooks that a job wants, found or made; None if it wants none. The model is loaded."""
    codebooks = job.codebooks
    return None if codebooks is None else observe(job, [codebooks])[0].tensors


def books_used(job: Job) -> Path | None:
    """Return the file of the static codebooks that a job works with; the model is loaded."""
    codebooks = job.codebooks
    return None if codebooks is None else calibration_file(job, codebooks)[0]


def observe(job: Job, observers: Sequence[Observer]) -> list[Artifact]:
    """Return calibrations of a loaded model; missing ones are made in one pass and saved.

    Processes that miss the same calibration wait for the first of them to make it.

    Raises:
        Busy: another one makes it, and the job does not wait.
    """
    files = [calibration_file(job, observer) for observer in observers]
    for path, _ in files:
        import_calibration(path, job.settings.runs_dirs)
    with ExitStack() as claims:
        for path in sorted(
            {path for path, _ in files if not path.is_file()}
        ):  # in order: no two wait for each other
            claims.enter_context(job.hold(path.with_name(f".{path.stem}")))
        if missing := [i for i, (path, _) in enumerate(files) if not path.is_file()]:
            prompts, settings = job.calibration_prompts, job.settings
            with tqdm(total=len(prompts), desc="calibration", unit="prompt", leave=None) as bar:
                watching = [observers[i] for i in missing]
                seed, batch = settings.calibrate.seed, _choose_batch(job)
                tensors = calibrate(job.model, prompts, watching, seed, settings.device, bar.update, batch)
            for i, made in zip(missing, tensors, strict=True):
                path, metadata = files[i]
                save_artifact(path, Artifact(observers[i].kind, made, metadata))
    return [
        load_artifact(path, observer.kind, metadata)
        for observer, (path, metadata) in zip(observers, files, strict=True)
    ]


def calibration_file(job: Job, observer: Observer) -> tuple[Path, dict[str, object]]:
    """Return the path of a calibration and the metadata it must have; the model is loaded."""
    metadata: dict[str, object] = {
        "kind": observer.kind,
        "observer": repr(observer),
        "model": job.model.name,
        "weights_sha256": job.model.weights_sha256,
        "sizes": [[s.height, s.width] for s in job.model.spec.segments],
        "settings": job.model_settings,
        "prompts": len(job.calibration_prompts),
        "prompts_sha256": hash_prompts(job.calibration_prompts),
        "seed": job.settings.calibrate.seed,
        "device": torch.device(job.settings.device).type,
    }
    if isinstance(observer, ReadsCodebooks):
        metadata["codebooks"] = repr(Codebooks())
    if job.settings.batch_invariant:
        metadata["batch_invariant"] = True
    # Earlier versions took one prompt at a time, as observers of codebooks do.
    if (batch := _choose_batch(job)) > 1 and not isinstance(observer, ReadsCodebooks):
        metadata["batch"] = batch
    return job.settings.runs_dir / job.model.name / artifact_name(metadata), metadata


def _choose_batch(job: Job) -> int:
    """Return how many prompts a calibration draws together: of texts one, since those of a batch end apart."""
    if find_sample_kind(job.model) is TEXTS:
        return 1
    return min(job.settings.calibrate.batch_size, len(job.calibration_prompts))


def generate(job: Job, folder: RunFolder) -> bool:
    """Generate this shard's missing blocks; return whether every sample of the run exists.

    Processes that do the same take different blocks. At the end patient ones wait for each other's, and take over those
    of a process that died. Out of memory, a process goes on with half as many prompts at a time. A block is saved while
    the next one is drawn, and stays claimed until it is.

    Raises:
        Busy: the context of a block refuses it.
    """
    settings, everything = job.settings, len(job.prompts)
    done = folder.samples()
    shard = blocks(everything, settings.batch_size, settings.shard.index, settings.shard.count)
    todo = [block for block in shard if any(index not in done for index in block)]
    total, absent = sum(map(len, shard)), sum(map(len, todo))
    limit = settings.batch_size
    cache = open_cache(job, read_books(job))
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
    return len(folder.samples()) == everything


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
