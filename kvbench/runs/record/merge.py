"""Merge of run folders: missing files are copied, and existing ones are never overwritten."""

import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvbench.core.claims import claim
from kvbench.core.config import ConfigError
from kvbench.core.files import MAX_STREAMED, check_file, hash_content, hash_path, read_bytes, write_beside
from kvbench.core.links import find_leaving_link
from kvbench.eval.files.kinds import find_stored_kind
from kvbench.runs.record.earlier import is_earlier
from kvbench.runs.record.folder import LOGS, RECORDS, RunFolder, RunName, SampleRecord, read_records
from kvbench.runs.record.origins import describe_difference, read_digests, read_origins
from kvbench.runs.record.results import FILE, Results
from kvbench.runs.record.samples import read_finished
from kvbench.runs.run_hash import Identity

BATCH_SIZE = 64
"""Number of samples that are read together."""
DESCRIPTION_FILES = ("config.yaml", "provenance.json", "retention.json")
"""Files that describe a run before it is finished."""
PROMPT_LISTS = ".prompts"
"""Folder in `runs_dir` with one empty file for each list of prompts, named by its SHA-256."""


class Merged(NamedTuple):
    """Outcome of merging a run folder or a calibration.

    Attributes:
        name: model and name.
        added: number of copied samples.
        known: number of samples that existed and are equal.
        problem: what was not merged and why; None if everything was merged.
    """

    name: str
    added: int = 0
    known: int = 0
    problem: str | None = None


def merge_runs(source: Path, runs_dir: Path) -> Iterator[Merged]:
    """Merge every run and calibration of another folder of runs into `runs_dir`, without runs of an earlier version.

    A damaged run, and one with a symbolic link that leaves its folder, has a problem and is left out.

    Raises:
        OSError: a file cannot be read or written.
    """
    for path in (source / PROMPT_LISTS).glob("*"):
        (runs_dir / PROMPT_LISTS).mkdir(parents=True, exist_ok=True)
        (runs_dir / PROMPT_LISTS / path.name).touch()
    for model in sorted(path for path in source.iterdir() if path.is_dir() and path.name[0] != "."):
        if model.is_symlink() and find_leaving_link(model, source) == model:
            yield Merged(model.name, problem=_describe_link(model))
            continue
        for path in sorted(model.glob("calibration-*.safetensors")):
            yield merge_file(path, runs_dir)
        for path in sorted(model.iterdir()):
            is_run = re.fullmatch(r".+-[0-9a-f]{10}", path.name) and find_stored_kind(path) is not None
            if is_run and not is_earlier(path):
                try:
                    yield merge_run(path, runs_dir)
                except ConfigError as error:
                    yield Merged(f"{model.name}/{path.name}", problem=str(error))


def merge_file(path: Path, runs_dir: Path) -> Merged:
    """Copy a calibration unless a file of its name exists."""
    name, target = f"{path.parent.name}/{path.name}", runs_dir / path.parent.name / path.name
    if path.is_symlink():
        return Merged(name, problem=_describe_link(path))
    if not target.is_file():
        copy_file(path, target)
    elif hash_path(path) != hash_path(target):
        return Merged(name, problem="differs from the existing calibration, which is kept")
    return Merged(name)


def merge_run(path: Path, runs_dir: Path) -> Merged:
    """Copy the samples of a run that are missing in `runs_dir`, and its results if all samples are then equal.

    Different samples of one prompt (by rounding on other hardware) are a conflict. Results are also left out if their
    reference differs from the one in `runs_dir`. Nothing is read or written through links that leave a run's folder.

    Raises:
        ConfigError: records or results are damaged.
    """
    kind = find_stored_kind(path)
    if kind is None:
        return Merged(f"{path.parent.name}/{path.name}", problem="is not a run")
    where = runs_dir, path.parent.name, RunName.of(path.name)
    target = RunFolder(*where, kind=kind, make=False).path
    name = f"{path.parent.name}/{target.name}"
    for one in (path, target):
        if one.exists() and (link := find_leaving_link(one, one.parent, [LOGS])) is not None:
            return Merged(name, problem=_describe_link(link))
    results = read_finished(path)  # nothing is copied of a run whose results are damaged
    if difference := describe_difference(read_digests(path), read_digests(target)):
        return Merged(name, problem=f"was made by {difference}; the existing run is kept")
    theirs = list(read_records(path).values())
    folder = RunFolder(*where, kind=kind)
    with claim(folder.place("merge")):
        ours = folder.samples()
        differing = [int(str(one["index"])) for one in theirs if not _is_same(one, ours)]
        missing = [one for one in theirs if one["index"] not in ours]
        added = copy_samples(folder, path, missing)
        _copy_missing(path, folder.path, DESCRIPTION_FILES)
        if added:
            folder.add_origins(read_origins(path))
        merged = Merged(name, added, len(theirs) - len(missing) - len(differing))
        if differing:
            more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            return merged._replace(
                problem=f"sample {differing[0]}{more} differ; the existing samples are kept"
            )
        if added < len(missing):
            return merged._replace(problem=f"{len(missing) - added} samples of {path} are damaged or missing")
        return merged._replace(
            problem=_merge_results(path, results, folder, [int(str(one["index"])) for one in theirs])
        )


def _describe_link(link: Path) -> str:
    return f"{link} is a symbolic link that leaves its folder; remove it or copy what it names"


def import_run(model: str, identity: Identity, runs_dir: Path, others: Sequence[str]) -> None:
    """Copy a run and its reference from the first folder where it is finished, unless it is finished here."""
    pattern = f"{model}/*-{identity.hash}/{FILE}"
    folders = [path.parent for folder in others for path in sorted(Path(folder).expanduser().glob(pattern))]
    if not folders or any(runs_dir.glob(pattern)):
        return
    results = read_finished(folders[0])
    if results is not None and results.reference is not None:
        merge_run(folders[0].with_name(results.reference), runs_dir)
    merge_run(folders[0], runs_dir)


def import_calibration(path: Path, others: Sequence[str]) -> None:
    """Copy a calibration from the first folder that has it, unless it exists here."""
    candidates = [Path(folder).expanduser() / path.parent.name / path.name for folder in others]
    if not path.is_file() and (source := next(filter(Path.is_file, candidates), None)) is not None:
        copy_file(source, path)


def _merge_results(
    path: Path, results: Results | None, folder: RunFolder, indices: Sequence[int]
) -> str | None:
    """Copy the other files of a finished run, results last; return the problem; None if there is none."""
    same = set(folder.samples()) == set(indices) and folder.path.name == path.name
    if results is None or folder.finished() or not same:
        return None  # nothing to copy, or not what was scored
    if results.reference is not None:
        known = read_records(folder.path.parent / results.reference)
        if not all(_is_same(one, known) for one in read_records(path.parent / results.reference).values()):
            return (
                f"scores are left out, since {results.reference} differs; repeat the command to score the run"
            )
    folder.tidy(sorted(indices))
    others = [file.relative_to(path).as_posix() for file in sorted(path.rglob("[!.]*")) if file.is_file()]
    samples = (f"{folder.kind.kind}/", f"{LOGS}/", RECORDS, FILE, "status")
    _copy_missing(path, folder.path, [one for one in others if not one.startswith(samples)])
    copy_file(path / FILE, folder.path / FILE)
    folder.note("done")
    return None


def _is_same(record: SampleRecord, known: dict[int, SampleRecord]) -> bool:
    """Return whether a record's sample equals the known one of its index, or none is known."""
    other = known.get(int(str(record["index"])))
    return other is None or other["sha256"] == record["sha256"]


def copy_samples(folder: RunFolder, source: Path, records: Sequence[SampleRecord]) -> int:
    """Copy samples of another run's folder, with these records; return the number that are undamaged.

    Raises:
        ConfigError: the run's own records are damaged.
    """
    count = 0
    for start in range(0, len(records), BATCH_SIZE):
        samples: list[tuple[SampleRecord, bytes]] = []
        for record in records[start : start + BATCH_SIZE]:
            file = folder.kind.find(source, int(str(record["index"])))
            if file.is_file() and hash_content(content := read_bytes(file, MAX_STREAMED)) == record["sha256"]:
                samples.append((record, content))
        folder.add_files(samples)
        count += len(samples)
    return count


def _copy_missing(source: Path, target: Path, names: Iterable[str]) -> None:
    for name in names:
        if (source / name).is_file() and not (target / name).exists():
            copy_file(source / name, target / name)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file, whole or not at all."""
    with write_beside(target) as beside:
        shutil.copyfile(check_file(source), beside)
