"""Samples that a run takes from earlier runs which differ from it in their prompts alone.

A sample depends on its prompt, the prompt's index and the seed, not on the other prompts. So a run of 512 prompts
takes the samples of a run of their first 64. Such runs are found by the hashes of all lists of prompts that were used
in a folder of runs, each an empty file `<runs_dir>/.prompts/<sha256>`.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvbench.core.config import ConfigError
from kvbench.runs.generate.retention import FILE as RETENTION
from kvbench.runs.generate.retention import read_retention
from kvbench.runs.job import Job
from kvbench.runs.record.folder import RECORDS, RunFolder, RunName, SampleRecord, read_records
from kvbench.runs.record.merge import PROMPT_LISTS, copy_file, copy_samples
from kvbench.runs.record.origins import describe_difference, read_digests, read_origins
from kvbench.runs.run_hash import Identity

log = logging.getLogger(__name__)


def note_prompts(runs_dir: Path, identity: Identity) -> None:
    """Record that a run with this list of prompts may exist, so that later runs find it."""
    path = runs_dir / PROMPT_LISTS / identity.prompts
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def take_samples(job: Job, folder: RunFolder, identity: Identity) -> bool:
    """Copy missing samples from runs of equal settings and other prompts; return whether all samples now exist.

    Samples of the same prompt, index and seed are taken. Runs in `runs_dirs` are used too, and so are unfinished
    runs. Records keep the costs of the earlier run. A resumed run does the same. Nothing is taken where the
    longest prompt of the run decides what is kept (`Job.longest`).

    Raises:
        Busy: another process takes samples for this run, and the job does not wait.
    """
    if job.longest is not None:
        return False
    settings = job.settings
    roots = (settings.runs_dir, *(Path(other).expanduser() for other in settings.runs_dirs))
    if sources := [path for root in roots for path in _find_alike(root / job.model.name, identity)]:
        with job.hold(folder.place("take")):
            for source in sources:
                _take_from(source, job, folder)
    return bool(sources) and folder.is_whole(len(job.prompts), read=job.is_leader)


def _find_alike(runs: Path, identity: Identity) -> list[Path]:
    """Return the folders of a model's runs whose identity differs in the prompts alone, the largest first."""
    places = runs.parent / PROMPT_LISTS, runs
    lists, folders = (sorted(path.name for path in place.glob("*")) for place in places)
    hashes = {replace(identity, prompts=prompts).hash for prompts in lists} - {identity.hash}
    alike = [runs / name for name in folders if RunName.of(name).hash in hashes]
    sizes = {path: path.stat().st_size for one in alike if (path := one / RECORDS).is_file()}
    return sorted(alike, key=lambda one: -sizes.get(one / RECORDS, 0))


def _take_from(source: Path, job: Job, folder: RunFolder) -> None:
    """Copy the samples of one run that this run lacks, with their part of its description."""
    known, total = folder.samples(), len(job.prompts)
    if difference := describe_difference(read_digests(source), read_digests(folder.path)):
        log.info("%s: takes nothing from %s, made by %s", folder.path.name, source.name, difference)
        return
    wanted = {prompt.index: prompt for prompt in job.prompts if prompt.index not in known}
    try:
        records = [
            {**record, "meta": wanted[index].meta}
            for index, record in read_records(source).items()
            if index in wanted and record.get("prompt") == wanted[index].text
        ]
        taken = copy_samples(folder, source, _leave_out_first_batch(source, folder, records))
    except (ConfigError, OSError):  # damaged or deleted in the meantime: its samples are generated instead
        return
    if taken:
        with folder.locked():
            provenance = folder.read_json("provenance.json") or {}
            earlier = provenance.get("taken")
            counts = {**(earlier if isinstance(earlier, dict) else {}), source.name: taken}
            folder.write("provenance.json", json.dumps({**provenance, "taken": counts}, indent=1))
        folder.add_origins(read_origins(source))
        log.info("%s: took %d of %d samples from %s", folder.path.name, taken, total, source.name)


def _leave_out_first_batch(
    source: Path, folder: RunFolder, records: Sequence[SampleRecord]
) -> Sequence[SampleRecord]:
    """Return records that can be taken without making retention.json anew, which describes the whole first batch.

    That file is copied with the samples that it describes.
    """
    retention = read_retention(source)
    if retention is None or (folder.path / RETENTION).exists():
        return records
    if {record["index"] for record in records} >= {*range(retention.prompts)}:
        copy_file(source / RETENTION, folder.path / RETENTION)
        return records
    return [record for record in records if int(str(record["index"])) >= retention.prompts]
