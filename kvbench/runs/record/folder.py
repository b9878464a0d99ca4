"""Run folders: samples that survive interruptions, and files that are written atomically.

runs/<model>/<method>-<budget>-<hash>/
    config.yaml provenance.json samples.jsonl images/000017.png retention.json metrics/*.json contact_sheet.png
    results.json status

A language model's run has texts/000017.txt in place of the images.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from kvbench.core.claims import claim, is_held, remove_lapsed
from kvbench.core.config import ConfigError
from kvbench.core.files import (
    hash_content,
    hash_path,
    naming,
    parse_json,
    read_bytes,
    read_text,
    remove_unfinished,
    write_whole,
)
from kvbench.eval.files.kinds import IMAGES, SampleKind
from kvbench.runs.record.origins import FILE as PROVENANCE
from kvbench.runs.record.origins import Origin, describe_difference, read_digests, with_origins
from kvbench.runs.record.results import FILE
from kvbench.runs.run_hash import Identity

RECORDS = "samples.jsonl"
WORK_CLAIMS = (".merge*", ".take*", ".block-*", ".eval-*")
"""Patterns of the names of claims on a run's work (`RunFolder.place`)."""
CLAIMS = (".lock*", *WORK_CLAIMS)
"""Patterns of the names of all claims in a run's folder."""
LOGS = "wandb"
"""Folder of the files of Weights & Biases, with links to its own logs elsewhere; neither published nor merged."""

LEFT = "left a race"
"""Status of a run that `task=choose` has generated as far as its race needed."""

SampleRecord = Mapping[str, object]
"""Fields of a line of samples.jsonl."""

FileState = tuple[int, int, int]
"""Inode, size and modification time of a file."""


class RunName(NamedTuple):
    """Name of a run's folder: a readable label and the hash of its identity."""

    label: str
    hash: str

    @classmethod
    def of(cls, name: str) -> "RunName":
        """Split the name of a run's folder, `<label>-<hash>`, into its parts."""
        label, _, digest = name.rpartition("-")
        return cls(label, digest)


class RunFolder:
    """A run on disk, which any number of processes may share.

    Args:
        root: `runs_dir`.
        model: name of the model.
        identity: identity of the run, or the name of its folder.
        kind: kind of its samples.
        make: create the folder if it does not exist.

    Raises:
        ConfigError: the folder cannot be created.
    """

    def __init__(
        self,
        root: Path,
        model: str,
        identity: Identity | RunName,
        *,
        kind: SampleKind = IMAGES,
        make: bool = True,
    ) -> None:
        # The run may exist under another name of the same method.
        paths = sorted((root / model).glob(f"*-{identity.hash}"))
        self.path = paths[0] if paths else root / model / f"{identity.label}-{identity.hash}"
        self._home = os.path.realpath(self.path)
        self.kind = kind
        self._known: dict[int, SampleRecord] = {}
        self._known_at: FileState | None = None
        self._written: dict[int, FileState | None] = {}  # files written by this object, with known contents
        try:
            if make:
                (self.path / kind.kind).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"runs_dir={root}: cannot be written ({error})") from None

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file of the folder atomically and return its path."""
        path = self._own(self.path / name)
        write_whole(path, content)
        return path

    def read_json(self, name: str) -> dict[str, object] | None:
        """Return the object in a JSON file; None if the file does not exist.

        Raises:
            ConfigError: the file is damaged.
        """
        path = self.path / name
        if not path.is_file():
            return None
        try:
            values = parse_json(read_text(path), finite=True)
            if not isinstance(values, dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise ConfigError(f"{path}: damaged ({error}); delete it: the run resumes without it") from None
        return values

    def finished(self) -> bool:
        """Return whether the run is complete: results are written last, and removed when samples change."""
        return (self.path / FILE).is_file()

    def note(self, status: str) -> None:
        """Write the status if it changes; a finished run stays `done` when another process fails."""
        with self.locked():
            line = f"{'done' if self.finished() else status}\n".encode()
            path = self.path / "status"
            if not path.is_file() or read_bytes(path) != line:
                write_whole(path, line)

    def remove_leftovers(self) -> None:
        """Remove temporary files and claims of killed processes, not of living ones."""
        remove_unfinished(self.path)
        for path in chain.from_iterable(self.path.glob(pattern) for pattern in CLAIMS):
            with suppress(OSError):  # the folder may belong to another user
                remove_lapsed(path)

    def start_anew(self, digests: Mapping[str, object]) -> int | None:
        """Remove the samples of a run that `digests` did not make; return their number.

        Returns:
            None if another process did so in the meantime.

        Raises:
            ConfigError: another process generates the run.
        """
        with self.locked():
            if not describe_difference(read_digests(self.path), digests):
                return None
            if any(is_held(path) for pattern in WORK_CLAIMS for path in self.path.glob(pattern)):
                raise ConfigError(
                    f"{self.path}: another process generates it with other code or calibration; wait for it, or stop it"
                )
            count = len(self._records())
            for name in (FILE, RECORDS, "retention.json", "code.json", "config.yaml", PROVENANCE):
                (self.path / name).unlink(missing_ok=True)
            return count

    def add_origins(self, origins: Iterable[Origin]) -> None:
        """Add origins to provenance.json, except known ones; nothing is written if the file does not exist.

        Raises:
            ConfigError: the file is damaged.
        """
        with self.locked():
            known = self.read_json(PROVENANCE)
            if known is not None and (whole := with_origins(known, origins)) != known:
                self.write(PROVENANCE, json.dumps(whole, indent=1))

    def place(self, work: str) -> Path:
        """Return the path of the claim on a piece of the run's work (`kvbench.core.claims.claim`)."""
        return self._own(self.path / f".{slug(work)}")

    def is_whole(self, count: int, *, read: bool = True) -> bool:
        """Return whether the first `count` samples are recorded and, with `read`, undamaged.

        Raises:
            ConfigError: samples.jsonl is damaged.
        """
        records = self.recorded()
        if not records.keys() >= {*range(count)}:
            return False
        return not read or all(self._intact(records[index]) for index in range(count))

    def recorded(self) -> dict[int, SampleRecord]:
        """Return recorded samples by index, without reading their files.

        Raises:
            ConfigError: samples.jsonl is damaged.
        """
        with self.locked():
            return dict(self._records())

    def samples(self, among: Iterable[int] | None = None) -> dict[int, SampleRecord]:
        """Return recorded samples by index, all or some, whose files are undamaged.

        Raises:
            ConfigError: samples.jsonl is damaged.
        """
        records = self.recorded()
        chosen = records if among is None else [index for index in among if index in records]
        return {index: records[index] for index in chosen if self._intact(records[index])}

    def add(self, records: Sequence[SampleRecord], outputs: Iterable[object]) -> None:
        """Save a block: its samples (images uint8 [H, W, 3] or texts), and their records; see `add_files`."""
        kind, pairs = self.kind, zip(records, outputs, strict=True)
        self.add_files([({**record, **kind.describe(one)}, kind.encode(one)) for record, one in pairs])

    def add_files(self, samples: Sequence[tuple[SampleRecord, bytes]]) -> None:
        """Save the contents of samples' files first, then their records in one write.

        Records get their `sha256` here. A sample that another process has saved is kept: with another batch size it may
        differ by rounding, and a record must match its file. Results are removed if samples change.

        Raises:
            ConfigError: samples.jsonl is damaged.
        """
        path = self._own(self.path / RECORDS)
        with self.locked():
            known = self._records()
            fresh: dict[int, tuple[SampleRecord, bytes]] = {}
            for record, content in samples:
                index = int(str(record["index"]))
                if index not in known or not self._intact(known[index]):
                    fresh[index] = {**record, "sha256": hash_content(content)}, content
            if any(
                known.get(index, {}).get("sha256") != record["sha256"] for index, (record, _) in fresh.items()
            ):
                (self.path / FILE).unlink(missing_ok=True)
            for index, (record, content) in fresh.items():
                target = self._own(self._file(record))
                write_whole(target, content)
                self._written[index] = _state(target)
            with naming(path), path.open("a") as file:
                file.write("".join(json.dumps(record) + "\n" for record, _ in fresh.values()))
                file.flush()
                os.fsync(file.fileno())
            self._known = known | {index: record for index, (record, _) in fresh.items()}
            self._known_at = _state(path)

    def tidy(
        self, expected: Sequence[int], metadata: Sequence[Mapping[str, object]] | None = None
    ) -> list[SampleRecord]:
        """Sort samples.jsonl, one line per sample, so that equal runs have equal records; return the records.

        With `metadata` (by index), which may have been corrected since generation, records get it.

        Raises:
            RuntimeError: a sample is missing.
            ConfigError: samples.jsonl is damaged.
        """
        samples = self.samples(expected)
        if missing := [index for index in expected if index not in samples]:
            raise RuntimeError(f"{self.path}: {len(missing)} samples are missing, the first is {missing[0]}")
        if metadata is not None:
            samples = {index: {**sample, "meta": metadata[index]} for index, sample in samples.items()}
        content = "".join(json.dumps(samples[index]) + "\n" for index in expected)
        with self.locked():
            if read_text(self.path / RECORDS) != content:
                self.write(RECORDS, content)
        return [samples[index] for index in expected]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock records, results and status against other processes while the block runs."""
        with claim(self.place("lock")):
            yield

    def _own(self, path: Path) -> Path:
        """Return a path to write to, if no link leads it out of the folder that was opened.

        Raises:
            ConfigError: a link leads out; it may be newer than this object.
        """
        if not (real := Path(os.path.realpath(path))).is_relative_to(self._home):
            raise ConfigError(
                f"{path}: leads out of the run's folder, to {real}; remove the symbolic link, then start the run again"
            )
        return path

    def _file(self, record: SampleRecord) -> Path:
        return self.kind.find(self.path, int(str(record["index"])))

    def _intact(self, record: SampleRecord) -> bool:
        """Return whether a record's file exists and has the recorded hash."""
        path = self._file(record)
        if (state := _state(path)) is None:
            return False
        if state == self._written.get(int(str(record["index"]))):
            return True
        return _hash_once(path.absolute(), state) == record["sha256"]

    def _records(self) -> dict[int, SampleRecord]:
        """Return the last record of each index; cut off an unfinished line of a killed process.

        Only lines that were added since the last call are read; all lines if the file was replaced.

        Raises:
            ConfigError: a line is not a record.
        """
        path = self.path / RECORDS
        if (state := _state(path)) is None:
            return {}
        if state != self._known_at:
            inode, size, _ = self._known_at or (None, 0, 0)
            start = size if state[0] == inode and state[1] > size else 0
            content = read_bytes(path)
            lines = content[: content.rfind(b"\n") + 1]
            if lines != content:
                os.truncate(self._own(path), len(lines))
            known = self._known if start else {}
            self._known, self._known_at = known | _read_records(path, lines, start), _state(path)
        return self._known


def read_records(folder: Path) -> dict[int, SampleRecord]:
    """Return the records of a run's folder by index, in order, without reading samples; nothing is written.

    Raises:
        ConfigError: a line is not a record.
    """
    path = folder / RECORDS
    content = read_bytes(path) if path.is_file() else b""
    return dict(sorted(_read_records(path, content[: content.rfind(b"\n") + 1], 0).items()))


def _read_records(path: Path, content: bytes, start: int) -> dict[int, SampleRecord]:
    """Return the records of the lines from byte `start` on."""
    records: dict[int, SampleRecord] = {}
    lines = content[start:].split(b"\n")[:-1]
    for number, line in enumerate(lines, content[:start].count(b"\n") + 1):
        try:
            record = parse_json(line, finite=True)
            if type(record["index"]) is not int or type(record["sha256"]) is not str:
                raise ValueError("index or sha256 is of the wrong type")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}: damaged (line {number}: {type(error).__name__} {error}); delete it, or that line, to "
                "generate its samples again"
            ) from None
        records[record["index"]] = record
    return records


@lru_cache(maxsize=1 << 18)
def _hash_once(path: Path, _: FileState) -> str:
    """Return the SHA-256 of a file, read once per change: every job of a sweep checks the reference."""
    return hash_path(path)


def _state(path: Path) -> FileState | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def blocks(count: int, size: int, shard: int, shards: int) -> list[range]:
    """Return the blocks (ranges of prompt indices) of a shard; a block is generated as one batch.

    >>> blocks(count=10, size=4, shard=0, shards=2)
    [range(0, 4), range(8, 10)]
    >>> blocks(count=10, size=4, shard=1, shards=2)
    [range(4, 8)]
    """
    starts = range(0, count, size)[shard::shards]
    return [range(start, min(start + size, count)) for start in starts]


def slug(text: str) -> str:
    """Return a string for a file name: letters, digits, _ and dots; all other characters become `-`."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-")
