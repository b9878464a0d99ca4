"""Samples of a run: reading, checks against their records, and pairing with another run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from kvbench.core.files import hash_content, hash_path, name_sample, parse_json, read_bytes, read_text

MAX_SHOWN = 5  # number of indices in an error message
THREADS = 4  # reading threads, since Pillow and hashing release the GIL

REWRITTEN_FROM = "rewritten_from"
"""Metadata key of the original prompt, if the model received a rewritten one."""

Item = TypeVar("Item")
Found = TypeVar("Found")
Name = TypeVar("Name")


class SampleSetError(ValueError):
    """A folder, or a pair of folders, cannot be scored."""


@dataclass(frozen=True)
class Sample:
    """One line of samples.jsonl.

    Attributes:
        index: index of the sample in the run, which names its file.
        seed: seed of the run.
        prompt: the model's prompt; empty if unknown.
        sha256: hash of the file.
        meta: metadata of the prompt, such as its GenEval line.
        size: width and height in pixels, from the image's file; zeros for a text.
        tokens: number of generated tokens of a text, including the end; None for an image.
        ended: whether a text ended by itself; false if it was truncated.
    """

    index: int
    seed: int
    prompt: str
    sha256: str
    meta: dict[str, object] = field(default_factory=dict)
    size: tuple[int, int] = (0, 0)
    tokens: int | None = None
    ended: bool = True

    @property
    def original(self) -> str:
        """Prompt before it was rewritten for the model."""
        return str(self.meta.get(REWRITTEN_FROM, self.prompt))

    @property
    def cluster(self) -> str:
        """Name of the cluster by which samples are resampled: the prompt, or the index if the prompt is unknown."""
        return self.original or f"sample {self.index}"


class SampleSet:
    """Samples of a run by index, each with a file (see `name_sample`) and a line in `samples.jsonl`.

    Every file is read once and checked against its record.

    Attributes:
        kind: kind of the samples, which is the name of their folder.
        suffix: suffix of the files.

    Args:
        folder: the run folder.
        indices: samples to open, of a run that may be unfinished; None for all of a whole run.

    Raises:
        SampleSetError: records or files are missing, altered or unreadable; of a whole run also if files are surplus.
    """

    kind: ClassVar[str]
    suffix: ClassVar[str]

    def __init__(self, folder: Path | str, indices: Sequence[int] | None = None) -> None:
        self.folder = Path(folder)
        records = read_samples(self.folder / "samples.jsonl")
        if indices is None:
            self._check_names(set(records))
        else:
            if missing := sorted(set(indices) - records.keys()):
                raise SampleSetError(f"{self.folder}: no record of sample {_some(list(map(str, missing)))}")
            records = {index: records[index] for index in indices}
        checked = map_in_threads(self._checked, [records[index] for index in sorted(records)])
        self.samples = {sample.index: sample for sample in checked}
        self.indices = list(self.samples)
        self.digest = self._digest()

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def clusters(self) -> list[str]:
        """Cluster of each sample; intervals treat clusters as the independent units."""
        return [sample.cluster for sample in self.samples.values()]

    @property
    def rewritten(self) -> bool:
        """Whether prompts were rewritten for the model."""
        return any(REWRITTEN_FROM in sample.meta for sample in self.samples.values())

    def with_metadata(self, metadata: Sequence[dict[str, object]]) -> Self:
        """Return the same samples with `metadata[index]` as metadata of each, instead of the recorded metadata."""
        other = copy(self)
        other.samples = {i: replace(sample, meta=metadata[i]) for i, sample in self.samples.items()}
        return other

    def meta(self, index: int) -> dict[str, object]:
        """Return the metadata of a sample's prompt."""
        return self.samples[index].meta

    def _digest(self) -> str:
        joined = "".join(f"{index} {sample.sha256}\n" for index, sample in self.samples.items())
        return hash_content(joined)

    def _path(self, index: int) -> Path:
        return self.folder / self.kind / name_sample(index, self.suffix)

    def _check_names(self, indices: set[int]) -> None:
        folder = self.folder / self.kind
        present = {path.relative_to(folder).as_posix() for path in folder.rglob(f"*{self.suffix}")}
        expected = {name_sample(index, self.suffix) for index in indices}
        # The listing of a network file system may be outdated; a single name is looked up.
        if missing := sorted(name for name in expected - present if not (folder / name).is_file()):
            raise SampleSetError(f"{self.folder}: missing {self.kind} of samples.jsonl: {_some(missing)}")
        if extra := sorted(present - expected):
            raise SampleSetError(f"{self.folder}: {self.kind} not in samples.jsonl: {_some(extra)}")

    def _checked(self, sample: Sample) -> Sample:
        self._compare(sample, hash_path(self._path(sample.index)))
        return sample

    def _read(self, sample: Sample) -> bytes:
        """Return the content of a sample's file, which must match its record."""
        data = read_bytes(self._path(sample.index))
        self._compare(sample, hash_content(data))
        return data

    def _compare(self, sample: Sample, sha256: str) -> None:
        if sha256 != sample.sha256:
            raise SampleSetError(
                f"{self._path(sample.index)} is not the recorded file (truncated or replaced): its sha256 differs; "
                "copy it again"
            )


def map_in_threads(function: Callable[[Item], Found], items: Iterable[Item]) -> list[Found]:
    """Map a function over items with a few threads; results keep the order of the items."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, items))


def check_same_samples(
    names: str, ours: Mapping[int, Sample], theirs: Mapping[int, Sample], attributes: Sequence[str]
) -> None:
    """Check that two sets have the same samples.

    Args:
        names: names of both sets, for the error.
        ours: samples of one set by index.
        theirs: samples of the other set.
        attributes: attributes that must be equal, such as `seed` and `prompt`.

    Raises:
        SampleSetError: the sets differ; the message names the first difference.
    """
    for side, missing in (("first", theirs.keys() - ours.keys()), ("second", ours.keys() - theirs.keys())):
        if missing:
            raise SampleSetError(
                f"{names} cannot be compared: indices missing from the {side}: {_some(sorted(missing))}"
            )
    for name in attributes:
        for index in sorted(ours):
            first, second = (getattr(side[index], name) for side in (ours, theirs))
            if first != second:
                raise SampleSetError(
                    f"{names} cannot be compared: sample {index} has {name} {first!r} and {second!r}"
                )


def group_indices(indices: Iterable[int], names: Iterable[Name]) -> dict[Name, list[int]]:
    """Group indices by name, in order; `names` has the name of each index."""
    groups: dict[Name, list[int]] = {}
    for index, name in zip(indices, names, strict=True):
        groups.setdefault(name, []).append(index)
    return groups


def read_samples(path: Path) -> dict[int, Sample]:
    """Return the records of samples.jsonl by index; raise SampleSetError if the file is missing, empty or malformed."""
    if not path.is_file():
        raise SampleSetError(f"{path} is missing: one JSON line per sample with index, seed, prompt, sha256")
    samples: dict[int, Sample] = {}
    try:
        lines = read_text(path).rstrip("\n").split("\n")  # `splitlines` would also split at U+2028
    except ValueError as error:
        raise SampleSetError(f"{path} is not UTF-8: {error}") from None
    records = _parse_lines(lines)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line) if records is None else records[number - 1]
            meta = record.get("meta") or {}
            if not isinstance(meta, dict):
                raise TypeError("meta is not an object")
            sample = Sample(
                int(record["index"]),
                int(record["seed"]),
                str(record["prompt"]),
                str(record["sha256"]),
                meta,
                tokens=record.get("tokens"),
                ended=bool(record.get("ended", True)),
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise SampleSetError(
                f"{path}, line {number}: {type(error).__name__} {error}; needed: index, seed, prompt, sha256"
            ) from error
        # A block that was interrupted and repeated may appear twice, with the same content.
        known = samples.setdefault(sample.index, sample)
        if known is not sample and known != sample:
            raise SampleSetError(
                f"{path}, line {number}: index {sample.index} has two different records; keep one"
            )
    if not samples:
        raise SampleSetError(f"{path} holds no samples")
    return samples


def _parse_lines(lines: Sequence[str]) -> list[Any] | None:
    """Parse all lines at once, in a third of the time of single lines; return None if a line is not one JSON value."""
    try:
        values = parse_json(f"[{','.join(lines)}]")
    except ValueError:
        return None
    return values if len(values) == len(lines) else None


def _some(items: Sequence[int] | Sequence[str]) -> str:
    more = f" and {len(items) - MAX_SHOWN} more" if len(items) > MAX_SHOWN else ""
    return ", ".join(str(item) for item in items[:MAX_SHOWN]) + more
