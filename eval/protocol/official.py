"""Exchange of files with a benchmark's own program: export of images, then import of its results."""

import csv
import io
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TypeVar

from kvbench.core.files import read_text
from kvbench.eval.files.images import ImageSet
from kvbench.eval.protocol.base import SkipEvaluation

T = TypeVar("T")


def require_results(path: Path, command: str, key: str, enabled: bool, export: Callable[[], None]) -> None:
    """Check that a program has written its results, or export the images for it.

    Args:
        path: file or folder of the results.
        command: instruction that runs the program.
        key: configuration key that enables the import, `eval.<name>.<field>`.
        enabled: value of the key.
        export: function that writes the images.

    Raises:
        SkipEvaluation: the images were exported; the reason says what to run.
        FileNotFoundError: the import is enabled and the results are missing.
    """
    if not enabled:
        export()
        raise SkipEvaluation(f"images exported; {command}; then set {key}=true")
    if not path.exists():
        field = key.rpartition(".")[2]
        raise FileNotFoundError(f"{path} is not there yet; with {field}=false first, {command}")


def group_images(images: ImageSet, names: Iterable[T]) -> dict[T, list[int]]:
    """Return the indices of the images that have the same name, by name, in order; `names` has one for each image."""
    groups: dict[T, list[int]] = {}
    for index, name in zip(images.indices, names, strict=True):
        groups.setdefault(name, []).append(index)
    return groups


def read_table(path: Path, columns: Collection[str]) -> list[dict[str, str]]:
    """Return the rows of a CSV file.

    Raises:
        ValueError: a column is missing.
    """
    reader = csv.DictReader(io.StringIO(read_text(path)))
    if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
        raise ValueError(f"{path}: no column {missing[0]!r}; needed: {', '.join(columns)}")
    return list(reader)
