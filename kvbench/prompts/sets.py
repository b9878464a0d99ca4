"""Bases of published prompt sets: their files, and the choice of prompts."""

import csv
import io
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, TypeVar

from kvbench.core.config import ConfigError
from kvbench.core.files import read_text, resolve_path
from kvbench.eval.files.fetch import download_file
from kvbench.eval.files.prompt_lines import check_letters
from kvbench.eval.files.weights import Weight, WeightError
from kvbench.prompts.base import (
    Count,
    Prompt,
    check_choices,
    check_total,
    choose_numbers,
    leave_out,
    repeat,
)

CACHE = "~/.cache/kvbench/prompts"

PromptEntry = tuple[str, dict[str, object]]
"""Text and metadata of a prompt of a set."""

T = TypeVar("T")


@dataclass(frozen=True)
class PromptSet:
    """Base class of published prompt sets.

    Attributes:
        path: the set's file or folder, `pkg://` inside a package; None searches `CACHE`.
        download: download missing files to `CACHE`, if the set has an address.
        count: number of prompts, spread evenly over the set; None takes all.
        per_prompt: consecutive samples of every prompt, numbered by `image_index` in their metadata.
        draw: seed of a random choice of `count` prompts; None spreads them evenly.
    """

    path: str | None = None
    download: bool = False
    count: Count | None = None
    per_prompt: Count = 1
    draw: int | None = None
    files: ClassVar[tuple[Weight, ...]] = ()
    source: ClassVar[str] = ""
    """Instructions for sets whose files have no single address."""
    form: ClassVar[str] = ""
    """Description of a valid file, for errors."""
    parts: ClassVar[tuple[str, str, tuple[str, ...]] | None] = None
    """Field that chooses parts of the set, metadata key of a prompt's part, and all parts; None without parts."""

    def __post_init__(self) -> None:
        if self.parts is not None:
            field, _, known = self.parts
            check_choices(field, getattr(self, field), known)

    def entries(self, path: Path) -> list[PromptEntry]:
        """Read all prompts of the set, in the order of its files, with parts that are not chosen.

        Raises:
            ConfigError, AttributeError, KeyError, TypeError: a file is malformed.
        """
        raise NotImplementedError

    def load(self) -> list[Prompt]:
        """Read the prompts; `prompt_index` in their metadata is the index in the set.

        Raises:
            ConfigError: a file is missing, unreadable, empty or malformed, or has too few prompts.
        """
        entries = self._read_all()
        chosen = [(number, *entries[number]) for number in self._choose(len(entries))]
        check_total(self.per_prompt * len(chosen), "per_prompt", self.per_prompt)
        return repeat(
            ((text, {**meta, "prompt_index": number}) for number, text, meta in chosen), self.per_prompt
        )

    def load_others(self, count: int, seed: int) -> list[Prompt]:
        """Return up to `count` random prompts of the set that are not evaluated, in the order of the set."""
        whole = replace(self, count=None, per_prompt=1).load()
        others = leave_out(whole, self.load(), len(whole))
        drawn = sorted(random.Random(seed).sample(range(len(others)), min(count, len(others))))
        return [replace(others[number], index=index) for index, number in enumerate(drawn)]

    def _read_all(self) -> list[PromptEntry]:
        path = self._find_files()
        try:
            entries = self.entries(path)
        except (AttributeError, KeyError, TypeError) as error:
            why = f"{type(error).__name__} {error}"
            raise ConfigError(f"prompts.path={path}: not {self.form} ({why}). {self.remedy()}") from None
        if self.parts is not None:
            field, key, _ = self.parts
            entries = [entry for entry in entries if entry[1][key] in getattr(self, field)]
        if not entries:
            raise ConfigError(f"prompts.path={path}: contains no prompts. {self.remedy()}")
        if blank := [number for number, (text, _) in enumerate(entries) if not text.strip()]:
            raise ConfigError(f"prompts.path={path}: prompt {blank[0]} is empty; remove it")
        return entries

    def _choose(self, total: int) -> list[int]:
        return choose_numbers(total, self.count, self.draw)

    def _find_files(self) -> Path:
        """Return the set's file or folder, downloaded if `download` is true; raise ConfigError if it is missing."""
        if self.path is not None:
            path = resolve_path(self.path)
            if not path.exists():
                raise ConfigError(f"prompts.path={self.path}: does not exist. {self.remedy()}")
            return path
        folder = Path(CACHE).expanduser()
        for file in self.files:
            target = folder / file.file
            if not target.is_file():
                self._download(file, target)
        if not self.files:
            raise ConfigError(f"prompts.path=null: {self.remedy()}")
        return folder if len(self.files) > 1 else folder / self.files[0].file

    def _download(self, file: Weight, target: Path) -> None:
        if not self.download:
            raise ConfigError(f"prompts.path=null: {target} is missing. {self.remedy()}")
        try:
            download_file(file.url, target, file.sha256)
        except (OSError, WeightError) as error:
            raise ConfigError(f"prompts.download=true: {error}. {self.remedy()}") from None

    def remedy(self) -> str:
        """Return instructions for obtaining the set's files."""
        fetched = ", or set prompts.download=true" if self.files else ""
        source = self.source or "".join(f"{Path(file.url).name} from {file.url}" for file in self.files[:1])
        return f"Get {source} and set prompts.path to it{fetched}"


@dataclass(frozen=True)
class TableSet(PromptSet):
    """Base class of sets in a CSV file, or with `tabs` in a file of tab-separated values; a line is a prompt."""

    text: ClassVar[str] = "prompt_en"
    """Name of the column with the prompts."""
    columns: ClassVar[Mapping[str, str]] = {}
    """Other columns that are read, by their keys in the metadata."""
    tabs: ClassVar[bool] = False

    def entries(self, path: Path) -> list[PromptEntry]:
        """Read the prompts, each with the cells of `columns`."""
        columns = (self.text, *self.columns.values())
        entries: list[PromptEntry] = []
        for row in read_file(path, self._split):
            if lacking := [column for column in columns if row.get(column) is None]:
                raise ConfigError(f"prompts.path={path}: no column {lacking[0]}, or a line without it")
            text, *cells = (row[column].strip() for column in columns)
            entries.append((text, dict(zip(self.columns, cells, strict=True))))
        return entries

    def _split(self, text: str) -> list[dict[str, str]]:
        try:
            if self.tabs:
                return list(csv.DictReader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE))
            return list(csv.DictReader(io.StringIO(text, newline="")))
        except csv.Error as error:
            raise ValueError(error) from None


def read_file(path: Path, parse: Callable[[str], T]) -> T:
    """Read and parse a file of `prompts.path`; raise ConfigError if it cannot be read or is malformed."""
    try:
        parsed = parse(read_text(path))
        check_letters(parsed)
    except (OSError, ValueError) as error:  # JSON and UTF-8 errors are ValueErrors
        raise ConfigError(f"prompts.path={path}: cannot be read ({error})") from None
    return parsed
