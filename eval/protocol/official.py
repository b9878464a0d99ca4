"""Exchange of files with a benchmark's official code: export of images, then import of its results."""

import csv
import io
import shutil
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvbench.core.files import read_text
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import file_sha256
from kvbench.eval.protocol.base import Evaluator, Result, SkipEvaluation, make_result
from kvbench.eval.protocol.scores import Score

Groups = Mapping[Any, Sequence[int]]
"""Indices of the images in each picture that the official code reads, by its name for the picture."""
Imported = tuple[Mapping[str, Score], Mapping[str, Sequence[object]], str | None]
"""Scores, columns and caveat, as for `make_result`."""
SAVE_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    ".png": {"compress_level": 1},
    ".webp": {"lossless": True, "method": 0},
}
"""Pillow's options for saving a picture, by its suffix."""


@dataclass(frozen=True)
class OfficialProgram(Evaluator):
    """Base class of metrics by a benchmark's official code, which has a folder in every run.

    The first call exports the images, and the reason of the result says which command to run. If the setting `switch`
    is true, the results of the official code are read.

    Attributes:
        folder: name of the folder, and of the evaluator in conf/eval.
        results: file or folder of the results, in `folder`.
        switch: name of the setting that reads results.
        picture: path of a picture in the folder, where {0} is its name.
        steps: instructions for making the results, with {folder}, {path} of the results, {count} of images in a
            picture, {side} of an image in pixels, and {grid} of columns and rows.
    """

    folder: ClassVar[str]
    results: ClassVar[str]
    switch: ClassVar[str] = "scores"
    picture: ClassVar[str] = "images/{0}.png"
    steps: ClassVar[str]

    @abstractmethod
    def group(self, images: ImageSet) -> Groups:
        """Return the images of each picture; raise ValueError if the official code cannot read such a run."""

    @abstractmethod
    def read(self, images: ImageSet, groups: Groups, path: Path) -> Imported:
        """Return scores, columns of samples and a caveat, if any; raise ValueError if results are of other images."""

    def list_references(self, run: Path) -> Mapping[str, Path | None]:
        """Return the path of the results by name if they are read, for the digest of inputs."""
        return {self.switch: run / self.folder / self.results} if getattr(self, self.switch) else {}

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        """Export the images or import their scores; reference and device are not used.

        Raises:
            SkipEvaluation: the images were exported; the reason says what to run.
            FileNotFoundError: `switch` is true and the results are missing.
        """
        groups = self.group(images)
        folder = images.folder.resolve() / self.folder
        todo = self.instruct(images, groups, folder)
        if not getattr(self, self.switch):
            self.export(images, groups, folder)
            key = f"eval.{self.folder}.{self.switch}"
            raise SkipEvaluation(f"images exported; {todo}; then set {key}=true")
        path = folder / self.results
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist yet; first, with {self.switch}=false, {todo}")
        scores, columns, caveat = self.read(images, groups, path)
        files = [path] if path.is_file() else sorted(path.glob("*.csv"))
        return make_result(self, scores, columns, {file.name: file_sha256(file) for file in files}, caveat)

    def instruct(self, images: ImageSet, groups: Groups, folder: Path) -> str:
        """Return `steps` with the values of a run."""
        count, side = max(map(len, groups.values())), images.samples[images.indices[0]].size[0]
        grid, path = f"{min(count, 2)},{-(-count // 2)}", folder / self.results
        return self.steps.format(folder=folder, path=path, count=count, side=side, grid=grid)

    def export(self, images: ImageSet, groups: Groups, folder: Path) -> None:
        """Write every picture: a PNG of one image is the image's file, any other picture has rows of two images."""
        shutil.rmtree(folder / "images", ignore_errors=True)  # official code reads all files in the folder
        for name, indices in groups.items():
            target = folder / self.picture.format(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if len(indices) == 1 and target.suffix == ".png":
                images.export(indices[0], target)
            else:
                images.grid(indices).save(target, **SAVE_OPTIONS[target.suffix])


def check_names(path: Path, found: Collection[str], known: Collection[str], *, spare: int = 0) -> list[str]:
    """Return the names of the run that results lack.

    Args:
        path: the results.
        found: names in the results.
        known: names in the run.
        spare: maximum number of names that may be missing.

    Raises:
        ValueError: results have a name that the run lacks, or lack more than `spare` of its names.
    """
    if unknown := [name for name in found if name not in known]:
        raise ValueError(f"{path}: {unknown[0]} is not of this run ({len(unknown)} are not); remove it")
    missing = [name for name in known if name not in found]
    if len(missing) > spare:
        some = ", ".join(missing[:5])
        raise ValueError(
            f"{path}: no result for {some} ({len(missing)} of {len(known)} are missing); make it again"
        )
    return missing


def read_table(path: Path, columns: Collection[str]) -> list[dict[str, str]]:
    """Return the rows of a CSV file; raise ValueError if a column is missing."""
    reader = csv.DictReader(io.StringIO(read_text(path)))
    if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
        raise ValueError(f"{path}: no column {missing[0]!r}; needed: {', '.join(columns)}")
    return list(reader)
