"""Samples of a run: reading, checks against their records, and pairing with those of another run."""

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar

from kvbench.core.files import hash_content, name_sample

SHOWN = 5  # indices named in an error
THREADS = 4  # that read: Pillow and hashes let the others run meanwhile

REWRITTEN_FROM = "rewritten_from"
"""Metadata key of the benchmark's prompt, if the model received a rewritten one."""

Item = TypeVar("Item")
Found = TypeVar("Found")


class SampleSetError(ValueError):
    """A folder, or a pair of folders, cannot be scored."""


@dataclass(frozen=True)
class Sample:
    """One line of samples.jsonl.

    Attributes:
        index: number of the sample, which names its file.
        seed: seed of the run.
        prompt: the prompt; empty where it is not known.
        sha256: hash of the file.
        meta: what else is known of the prompt, such as its GenEval line.
        size: width and height in pixels, read from the image; zeros of a text.
        tokens: tokens that a text was drawn in, its end included; None of an image.
        ended: whether a text came to its end, instead of being cut.
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
        """The benchmark's prompt: what the model received unless that was rewritten."""
        return str(self.meta.get(REWRITTEN_FROM, self.prompt))

    @property
    def cluster(self) -> str:
        """Its prompt, or a name of its own without any: samples of one cluster are resampled together."""
        return self.original or f"sample {self.index}"


class SampleSet:
    """Samples of one run by index: a file each (see `name_sample`) and one line each in `samples.jsonl`.

    Every file is read once at the start and checked against its record.

    Attributes:
        kind: kind of the samples, which names their folder.
        suffix: of their files.

    Args:
        folder: the run folder.

    Raises:
        SampleSetError: records or files are missing, surplus, altered or unreadable.
    """

    kind: ClassVar[str]
    suffix: ClassVar[str]

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        records = read_samples(self.folder / "samples.jsonl")
        self._check_names(set(records))
        checked = map_in_threads(self._checked, [records[index] for index in sorted(records)])
        self.samples = {sample.index: sample for sample in checked}
        self.indices = list(self.samples)
        self.digest = self._digest()

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def clusters(self) -> list[str]:
        """The cluster of each sample."""
        return [sample.cluster for sample in self.samples.values()]

    @property
    def rewritten(self) -> bool:
        """Whether the model received other texts than the benchmark's prompts."""
        return any(REWRITTEN_FROM in sample.meta for sample in self.samples.values())

    def meta(self, index: int) -> dict[str, object]:
        """Fields of a sample's prompt."""
        return self.samples[index].meta

    def _digest(self) -> str:
        joined = "".join(f"{index} {sample.sha256}\n" for index, sample in self.samples.items())
        return hash_content(joined)

    def _path(self, index: int) -> Path:
        return self.folder / self.kind / name_sample(index, self.suffix)

    def _check_names(self, indices: set[int]) -> None:
        place = self.folder / self.kind
        present = {path.relative_to(place).as_posix() for path in place.rglob(f"*{self.suffix}")}
        expected = {name_sample(index, self.suffix) for index in indices}
        # A network file system may list a folder late; a single name is then known all the same.
        if missing := sorted(name for name in expected - present if not (place / name).is_file()):
            raise SampleSetError(
                f"{self.folder}: samples.jsonl names {self.kind} that are not there: {_some(missing)}"
            )
        if extra := sorted(present - expected):
            raise SampleSetError(
                f"{self.folder}: {self.kind} without a line in samples.jsonl: {_some(extra)}"
            )

    def _checked(self, sample: Sample) -> Sample:
        self._read(sample)
        return sample

    def _read(self, sample: Sample) -> bytes:
        """Return what a sample's file holds, which must be what was recorded."""
        path = self._path(sample.index)
        data = path.read_bytes()
        if hash_content(data) != sample.sha256:
            raise SampleSetError(
                f"{path} is not the recorded file (truncated or replaced): its sha256 differs"
            )
        return data


def map_in_threads(function: Callable[[Item], Found], items: Iterable[Item]) -> list[Found]:
    """Return a function's values in the order of its arguments, computed in a few threads."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, items))


def check_pairs(samples: SampleSet, reference: SampleSet, *, same_seeds: bool = True) -> None:
    """Check that two sets hold the same samples: index, seed (if `same_seeds`), prompt and image size.

    Raises:
        SampleSetError: naming the first differences.
    """
    names = f"{samples.folder} and its reference {reference.folder} cannot be paired: "
    if missing := sorted(set(reference.indices) - set(samples.indices)):
        raise SampleSetError(f"{names}indices missing from the first: {_some(missing)}")
    if extra := sorted(set(samples.indices) - set(reference.indices)):
        raise SampleSetError(f"{names}indices missing from the reference: {_some(extra)}")
    for attribute in ("seed", "prompt", "size") if same_seeds else ("prompt", "size"):
        for index in samples.indices:
            ours, theirs = (getattr(side.samples[index], attribute) for side in (samples, reference))
            if ours != theirs:
                raise SampleSetError(f"{names}sample {index} has {attribute} {ours!r} and {theirs!r}")


def read_samples(path: Path) -> dict[int, Sample]:
    """Records of a samples.jsonl by index; SampleSetError if it cannot be read or holds none."""
    if not path.is_file():
        raise SampleSetError(
            f"{path} is missing: one JSON line per sample with index, seed, prompt and sha256"
        )
    found: dict[int, Sample] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            sample = Sample(
                int(record["index"]),
                int(record["seed"]),
                str(record["prompt"]),
                record["sha256"],
                record.get("meta") or {},
                tokens=record.get("tokens"),
                ended=bool(record.get("ended", True)),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise SampleSetError(
                f"{path}, line {number}: {type(error).__name__} {error}; needed: index, seed, prompt, sha256"
            ) from error
        # A block that was interrupted and done again may appear twice, with the same content.
        if found.setdefault(sample.index, sample) != sample:
            raise SampleSetError(
                f"{path}, line {number}: index {sample.index} appears twice with different content"
            )
    if not found:
        raise SampleSetError(f"{path} holds no samples")
    return found


def _some(items: Sequence[int] | Sequence[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(str(item) for item in items[:SHOWN]) + more
