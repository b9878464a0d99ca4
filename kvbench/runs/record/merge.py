"""Merge of run folders from elsewhere: what is missing is copied, and nothing that is there is overwritten."""

import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kvbench.core.claims import claim
from kvbench.core.files import hash_content, hash_path, write_beside
from kvbench.runs.record.folder import RECORDS, Record, RunFolder, RunName, read_records
from kvbench.runs.record.kinds import SAMPLE_KINDS, SampleKind
from kvbench.runs.record.results import FILE, read_results
from kvbench.runs.run_hash import Identity

CHUNK = 64
"""Samples that are read at a time."""
DESCRIBING = ("config.yaml", "provenance.json", "retention.json")
"""Files that describe a run before it is finished."""


class Merged(NamedTuple):
    """Outcome of merging a run folder or a calibration.

    Attributes:
        name: model and name.
        added: samples that were copied.
        known: samples that were there and are the same.
        problem: what was not merged and why; None if nothing is missing.
    """

    name: str
    added: int = 0
    known: int = 0
    problem: str | None = None


def merge_runs(source: Path, runs_dir: Path) -> Iterator[Merged]:
    """Merge every run and calibration of another folder of runs into `runs_dir`.

    Raises:
        ConfigError: a run's records or results are damaged.
        OSError: a file cannot be read or written.
    """
    for model in sorted(path for path in source.iterdir() if path.is_dir() and path.name[0] != "."):
        for path in sorted(model.glob("calibration-*.safetensors")):
            yield merge_file(path, runs_dir)
        for path in sorted(model.iterdir()):
            if re.fullmatch(r".+-[0-9a-f]{10}", path.name) and find_kind(path) is not None:
                yield merge_run(path, runs_dir)


def merge_file(path: Path, runs_dir: Path) -> Merged:
    """Copy a calibration unless there is one of its name."""
    name, target = f"{path.parent.name}/{path.name}", runs_dir / path.parent.name / path.name
    if not target.is_file():
        _copy(path, target)
    elif hash_path(path) != hash_path(target):
        return Merged(name, problem="is another calibration; the one that was there is kept")
    return Merged(name)


def merge_run(path: Path, runs_dir: Path) -> Merged:
    """Copy the samples of a run that are missing in `runs_dir`, and its results if all samples are the same then.

    Samples of the same prompt that differ, as those of other hardware may by rounding, are a conflict. Results are
    also left out if they compare with a reference that differs from the one in `runs_dir`.

    Args:
        path: a run's folder, which is only read; nothing is done where there is none.
        runs_dir: where the run is merged.
    """
    kind = find_kind(path)
    if kind is None:
        return Merged(f"{path.parent.name}/{path.name}", problem="is no run")
    stored = replace(kind, encode=bytes, describe=lambda _: {})
    folder = RunFolder(runs_dir, path.parent.name, RunName.of(path.name), kind=stored)
    name = f"{path.parent.name}/{folder.path.name}"
    with claim(folder.place("merge")):
        theirs = list(read_records(path).values())
        ours = folder.samples()
        differing = [int(str(one["index"])) for one in theirs if not _is_same(one, ours)]
        missing = [one for one in theirs if one["index"] not in ours]
        starts = range(0, len(missing), CHUNK)
        added = sum(_add(folder, path, kind, missing[start : start + CHUNK]) for start in starts)
        _copy_missing(path, folder.path, DESCRIBING)
        merged = Merged(name, added, len(theirs) - len(missing) - len(differing))
        if differing:
            more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            return merged._replace(
                problem=f"sample {differing[0]}{more} differ; those that were there are kept"
            )
        if added < len(missing):
            return merged._replace(problem=f"{len(missing) - added} samples of {path} are damaged or missing")
        return merged._replace(
            problem=_merge_results(path, folder, [int(str(one["index"])) for one in theirs])
        )


def import_run(model: str, identity: Identity, runs_dir: Path, others: Sequence[str]) -> None:
    """Copy a run and its reference from the first of other folders where it is finished, unless it is finished here."""
    pattern = f"{model}/*-{identity.hash}/{FILE}"
    found = [path.parent for folder in others for path in sorted(Path(folder).expanduser().glob(pattern))]
    if not found or any(runs_dir.glob(pattern)):
        return
    results = read_results(found[0])
    if results is not None and results.reference is not None:
        merge_run(found[0].with_name(results.reference), runs_dir)
    merge_run(found[0], runs_dir)


def import_calibration(path: Path, others: Sequence[str]) -> None:
    """Copy a calibration from the first of other folders that has it, unless it is here."""
    found = [Path(folder).expanduser() / path.parent.name / path.name for folder in others]
    if not path.is_file() and (there := next(filter(Path.is_file, found), None)) is not None:
        _copy(there, path)


def find_kind(path: Path) -> SampleKind | None:
    """Return the kind of samples that a run's folder has; None if it is no run's."""
    return next((kind for kind in SAMPLE_KINDS.values() if (path / kind.kind).is_dir()), None)


def _merge_results(path: Path, folder: RunFolder, indices: Sequence[int]) -> str | None:
    """Copy what a finished run has beside its samples, results last; return why not, None if there is no problem."""
    results = read_results(path)
    same = set(folder.samples()) == set(indices) and folder.path.name == path.name
    if results is None or folder.finished() or not same:
        return None  # nothing to copy, or not what was scored
    if results.reference is not None:
        known = read_records(folder.path.parent / results.reference)
        if not all(_is_same(one, known) for one in read_records(path.parent / results.reference).values()):
            return f"scores are left out, since {results.reference} differs; the same command scores it anew"
    folder.tidy(sorted(indices))
    others = [file.relative_to(path).as_posix() for file in sorted(path.rglob("[!.]*")) if file.is_file()]
    samples = (f"{folder.kind.kind}/", RECORDS, FILE, "status")
    _copy_missing(path, folder.path, [one for one in others if not one.startswith(samples)])
    _copy(path / FILE, folder.path / FILE)
    folder.note("done")
    return None


def _is_same(record: Record, known: dict[int, Record]) -> bool:
    """Return whether a record's sample is the known one of its index, or there is none."""
    other = known.get(int(str(record["index"])))
    return other is None or other["sha256"] == record["sha256"]


def _add(folder: RunFolder, path: Path, kind: SampleKind, records: Iterable[Record]) -> int:
    """Add samples whose files are those that were recorded; return how many."""
    whole: list[tuple[Record, bytes]] = []
    for record in records:
        file = kind.find(path, int(str(record["index"])))
        if file.is_file() and hash_content(content := file.read_bytes()) == record["sha256"]:
            whole.append((record, content))
    folder.add([record for record, _ in whole], [content for _, content in whole])
    return len(whole)


def _copy_missing(source: Path, target: Path, names: Iterable[str]) -> None:
    for name in names:
        if (source / name).is_file() and not (target / name).exists():
            _copy(source / name, target / name)


def _copy(source: Path, target: Path) -> None:
    with write_beside(target) as beside:
        shutil.copyfile(source, beside)
