"""Run folders: identity, samples that survive any interruption, whole files.

runs/<model>/<method>-<budget>-<hash>/
    config.yaml provenance.json samples.jsonl images/000017.png retention.json metrics/*.json contact_sheet.png
    results.json status

A language model's run has texts/000017.txt in place of the images.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from kvbench.core.claims import claim
from kvbench.core.config import ConfigError
from kvbench.core.files import hash_content, hash_path, naming, parse_json, write_whole
from kvbench.runs.record.kinds import IMAGES, SampleKind
from kvbench.runs.record.results import FILE
from kvbench.runs.run_hash import Identity

RECORDS = "samples.jsonl"

Record = Mapping[str, object]
"""A line of samples.jsonl."""

State = tuple[int, int, int]
"""Signature of a file's state: inode, size and time."""


class RunName(NamedTuple):
    """Name of a run's folder: a readable label and the hash of its identity."""

    label: str
    hash: str

    @classmethod
    def of(cls, name: str) -> "RunName":
        """Take a name apart."""
        label, _, hashed = name.rpartition("-")
        return cls(label, hashed)


class RunFolder:
    """One run on disk; any number of processes may hold it.

    Args:
        root: `runs_dir`.
        model: name of the model.
        identity: what the run is, or the name of its folder.
        kind: kind of its samples.
        make: make the folder where it is not there yet.

    Raises:
        ConfigError: the folder cannot be made.
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
        known = sorted(
            (root / model).glob(f"*-{identity.hash}")
        )  # made under another name of the same method
        self.path = known[0] if known else root / model / f"{identity.label}-{identity.hash}"
        self.kind = kind
        self._known: dict[int, Record] = {}
        self._known_at: State | None = None
        self._written: dict[int, State | None] = {}  # of files written here, whose content is known
        try:
            if make:
                (self.path / kind.kind).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"runs_dir={root}: cannot be written ({error})") from None

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file of the folder, whole or not at all."""
        path = self.path / name
        write_whole(path, content)
        return path

    def read_json(self, name: str) -> dict[str, object] | None:
        """Return the object in a JSON file; None if the file does not exist.

        Raises:
            ConfigError: it holds something else.
        """
        path = self.path / name
        if not path.is_file():
            return None
        try:
            values = parse_json(path.read_text(encoding="utf-8"), finite=True)
            if not isinstance(values, dict):
                raise ValueError("it holds no object")
        except ValueError as error:
            raise ConfigError(f"{path}: damaged ({error}); delete it: the run resumes without it") from None
        return values

    def finished(self) -> bool:
        """Whether the run was completed: its results are written last, and removed when its samples change."""
        return (self.path / FILE).is_file()

    def note(self, status: str) -> None:
        """Write the status unless it is there; a finished run stays `done` when another process fails."""
        with self.locked():
            line = f"{'done' if self.finished() else status}\n".encode()
            path = self.path / "status"
            if not path.is_file() or path.read_bytes() != line:
                write_whole(path, line)

    def place(self, work: str) -> Path:
        """Return the file that a claim on a piece of the run's work is; see `kvbench.core.claims.claim`."""
        return self.path / f".{slug(work)}"

    def is_whole(self, count: int, *, read: bool = True) -> bool:
        """Return whether the first `count` samples are recorded and, if they are to be read, there and undamaged.

        Raises:
            ConfigError: samples.jsonl is damaged.
        """
        records, every = self.recorded(), range(count)
        if not records.keys() >= {*every}:
            return False
        return not read or all(self._intact(records[index]) for index in every)

    def recorded(self) -> dict[int, Record]:
        """Return recorded samples by index, without a look at their files.

        Raises:
            ConfigError: samples.jsonl is damaged.
        """
        with self.locked():
            return dict(self._records())

    def samples(self, among: Iterable[int] | None = None) -> dict[int, Record]:
        """Return recorded samples by index, all or some, whose file is there and is the recorded one.

        Raises:
            ConfigError: samples.jsonl is damaged.
        """
        records = self.recorded()
        chosen = records if among is None else [index for index in among if index in records]
        return {index: records[index] for index in chosen if self._intact(records[index])}

    def add(self, records: Sequence[Record], made: Iterable[object]) -> None:
        """Save a block: its samples first, then its lines in one write.

        Records get their `sha256` here. A sample that another process saved in the meantime stays as it is: with
        another batch size it may differ in rounding, and a record must belong to its file. Results of samples that are
        others now are removed.

        Args:
            records: one a sample.
            made: the samples, images uint8 [H, W, 3] or texts.

        Raises:
            ConfigError: samples.jsonl is damaged.
        """
        encoded = [(self.kind.describe(one), self.kind.encode(one)) for one in made]
        path = self.path / RECORDS
        with self.locked():
            known = self._records()
            fresh: dict[int, tuple[Record, bytes]] = {}
            for record, (more, content) in zip(records, encoded, strict=True):
                index = int(str(record["index"]))
                if index not in known or not self._intact(known[index]):
                    fresh[index] = {**record, **more, "sha256": hash_content(content)}, content
            if any(
                known.get(index, {}).get("sha256") != record["sha256"] for index, (record, _) in fresh.items()
            ):
                (self.path / FILE).unlink(missing_ok=True)
            for index, (record, content) in fresh.items():
                place = self._file(record)
                write_whole(place, content)
                self._written[index] = _state(place)
            with naming(path), path.open("a") as file:
                file.write("".join(json.dumps(record) + "\n" for record, _ in fresh.values()))
                file.flush()
                os.fsync(file.fileno())
            self._known = known | {index: record for index, (record, _) in fresh.items()}
            self._known_at = _state(path)

    def tidy(self, expected: Sequence[int]) -> list[Record]:
        """Rewrite samples.jsonl in order, one line per sample, so that equal runs have equal records; return them.

        Raises:
            RuntimeError: a sample is missing.
            ConfigError: samples.jsonl is damaged.
        """
        samples = self.samples(expected)
        if missing := [index for index in expected if index not in samples]:
            raise RuntimeError(f"{self.path}: {len(missing)} samples are missing, the first is {missing[0]}")
        content = "".join(json.dumps(samples[index]) + "\n" for index in expected)
        with self.locked():
            if (self.path / RECORDS).read_text(encoding="utf-8") != content:
                self.write(RECORDS, content)
        return [samples[index] for index in expected]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other process from records, results and status, for instants."""
        with claim(self.path / ".lock"):
            yield

    def _file(self, record: Record) -> Path:
        return self.kind.find(self.path, int(str(record["index"])))

    def _intact(self, record: Record) -> bool:
        """Return whether a record's file is there and is the recorded one."""
        path = self._file(record)
        if (state := _state(path)) is None:
            return False
        if state == self._written.get(int(str(record["index"]))):
            return True
        return _hash_once(path.absolute(), state) == record["sha256"]

    def _records(self) -> dict[int, Record]:
        """Lines of samples.jsonl by index, the last one of each; cuts off the torn end a killed process may leave.

        What another process has added is read when it has; all lines are read again where the file is another one.

        Raises:
            ConfigError: a line is not a record.
        """
        path = self.path / RECORDS
        if (state := _state(path)) is None:
            return {}
        if state != self._known_at:
            inode, size, _ = self._known_at or (None, 0, 0)
            start = size if state[0] == inode and state[1] > size else 0
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if whole != content:
                os.truncate(path, len(whole))
            known = self._known if start else {}
            self._known, self._known_at = known | _read_records(path, whole, start), _state(path)
        return self._known


def read_records(folder: Path) -> dict[int, Record]:
    """Return the records of a run's folder by index, in order, without looking at samples; nothing is written.

    Raises:
        ConfigError: a line is not a record.
    """
    path = folder / RECORDS
    content = path.read_bytes() if path.is_file() else b""
    return dict(sorted(_read_records(path, content[: content.rfind(b"\n") + 1], 0).items()))


def _read_records(path: Path, content: bytes, start: int) -> dict[int, Record]:
    """Return the records of the lines from byte `start` on."""
    found: dict[int, Record] = {}
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
        found[record["index"]] = record
    return found


@lru_cache(maxsize=1 << 18)
def _hash_once(path: Path, _: State) -> str:
    """Return the SHA-256 of a file; it is read once per change, though every job of a sweep looks at the reference."""
    return hash_path(path)


def _state(path: Path) -> State | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def blocks(count: int, size: int, shard: int, shards: int) -> list[range]:
    """Return the blocks of consecutive prompt indices that belong to a shard; a block is generated as one batch.

    >>> blocks(count=10, size=4, shard=0, shards=2)
    [range(0, 4), range(8, 10)]
    >>> blocks(count=10, size=4, shard=1, shards=2)
    [range(4, 8)]
    """
    every = [range(start, min(start + size, count)) for start in range(0, count, size)]
    return every[shard::shards]


def slug(text: str) -> str:
    """Return a text as part of a file name."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-")
