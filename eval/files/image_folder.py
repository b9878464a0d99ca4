"""Folders of images without records: each file is a sample, paired by file name."""

import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvbench.core.files import hash_content, read_bytes, read_text
from kvbench.eval.files.images import ImageSet, read_size
from kvbench.eval.files.kinds import open_samples
from kvbench.eval.files.pictures import find_orientation, open_picture
from kvbench.eval.files.prompt_lines import parse_json_lines, parse_lines
from kvbench.eval.files.samples import MAX_SHOWN, Sample, SampleSet, SampleSetError, map_in_threads

log = logging.getLogger(__name__)

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
SHOWN = ", ".join(SUFFIXES)


class PlainFolder(ImageSet):
    """Images of a folder in the natural order of their names: 2.png comes before 10.png.

    Args:
        folder: contains the images, or has them below `images/`; a warning names other files and rotated images.
        prompts: file with the prompt of each image in that order, one per line, or JSON lines with `prompt` and other
            metadata, for example of GenEval. None makes each image a cluster of its own in intervals.

    Raises:
        SampleSetError: there are no images, two have one stem, one cannot be decoded or is not 8-bit RGB, or the
            prompts are malformed or not as many as the images.
    """

    def __init__(self, folder: Path | str, prompts: Path | None = None) -> None:
        self.folder = Path(folder)
        self._files = list_images(self.folder)
        count = len(self._files)
        lines = [("", {})] * count if prompts is None else _read_prompts(prompts, count)
        unread = [Sample(index, 0, text, "", dict(meta)) for index, (text, meta) in enumerate(lines)]
        self.samples = {sample.index: sample for sample in map_in_threads(self._checked, unread)}
        self.indices = list(self.samples)
        self.digest = mark_turned(self.folder, self._files, self._digest())
        warn_unread(*_list_entries(self.folder))

    def _path(self, index: int) -> Path:
        return self._files[index]

    def _checked(self, sample: Sample) -> Sample:
        path = self._path(sample.index)
        data = read_bytes(path)
        size = read_size(path, data, decode=True)
        return Sample(sample.index, sample.seed, sample.prompt, hash_content(data), sample.meta, size)


def open_pair(
    folder: Path, reference: Path | None, prompts: Path | None = None
) -> tuple[SampleSet, SampleSet | None]:
    """Open a folder and its reference, if given.

    Run folders are paired by their records. With a file of prompts, or if one side is another folder, both are opened
    as folders of images and paired by file name.

    Raises:
        SampleSetError: a folder cannot be scored, or images of one side are missing on the other.
    """
    folders = [folder] if reference is None else [folder, reference]
    opened: list[SampleSet]
    if prompts is None and all((path / "samples.jsonl").is_file() for path in folders):
        opened = [open_samples(path) for path in folders]
    else:
        check_names(folders)
        opened = [PlainFolder(path, prompts) for path in folders]
    return opened[0], opened[1] if reference is not None else None


def list_images(folder: Path) -> list[Path]:
    """Return the images in a folder, or below its `images/`, in the natural order of their names.

    Raises:
        SampleSetError: the folder is missing, has no images, or has two with one stem.
    """
    home, entries = _list_entries(folder)
    files = [path for path in entries if is_read(path)]
    if not files:
        raise SampleSetError(f"{home}: holds no images ({SHOWN})")
    stems = [path.stem for path in files]
    if len(set(stems)) < len(stems):
        twice = min(stem for stem in stems if stems.count(stem) > 1)
        raise SampleSetError(f"{home}: two images are called {twice}; rename one")
    return sorted(files, key=lambda path: (_natural(path.stem), path.stem))


def is_read(path: Path) -> bool:
    """Return whether a path is a file with the suffix of an image."""
    return path.suffix.lower() in SUFFIXES and path.is_file()


def warn_unread(home: Path, entries: Iterable[Path]) -> None:
    """Log a warning that counts and names the entries of a folder apart from images and hidden files."""
    others = sorted(
        path.relative_to(home).as_posix() + "/" * path.is_dir()
        for path in entries
        if not is_read(path) and not path.name.startswith(".")
    )
    if others:
        some = ", ".join(others[:MAX_SHOWN]) + (", ..." if len(others) > MAX_SHOWN else "")
        log.warning("%s: %d entries are not images (%s) and are not read: %s", home, len(others), SHOWN, some)


def mark_turned(folder: Path, files: Sequence[Path], digest: str) -> str:
    """Return `digest`, or a different digest if EXIF rotates images; a warning counts and names these."""
    pairs = zip(files, map_in_threads(_is_turned, files), strict=True)
    turned = [path.name for path, is_turned in pairs if is_turned]
    if not turned:
        return digest
    some = ", ".join(turned[:MAX_SHOWN]) + (", ..." if len(turned) > MAX_SHOWN else "")
    log.warning("%s: %d images are rotated by their EXIF orientation: %s", folder, len(turned), some)
    return hash_content(f"turned {digest}")


def _is_turned(path: Path) -> bool:
    with open_picture(path) as image:
        return find_orientation(image) > 1


def _list_entries(folder: Path) -> tuple[Path, list[Path]]:
    """Return a folder and its entries, or its `images/` and the files below, if it has them."""
    inner = folder / "images"
    if inner.is_dir():
        return inner, [path for path in inner.rglob("*") if not path.is_dir()]  # a run has subfolders
    if not folder.is_dir():
        raise SampleSetError(f"{folder}: no such folder")
    return folder, list(folder.iterdir())


def check_names(folders: list[Path]) -> None:
    """Check that folders hold images of equal stems; a SampleSetError names up to five missing ones."""
    names = [{path.stem for path in list_images(folder)} for folder in folders]
    for folder, present in zip(folders, names, strict=True):
        if missing := set().union(*names) - present:
            some = ", ".join(sorted(missing)[:5])
            raise SampleSetError(f"{folder}: lacks {len(missing)} images of the other folder: {some}")


def _natural(name: str) -> list[str | int]:
    """Return the sort key of a name: alternating strings and integers."""
    return [int(part) if index % 2 else part for index, part in enumerate(re.split(r"([0-9]+)", name))]


def _read_prompts(path: Path, images: int) -> list[tuple[str, dict[str, object]]]:
    try:
        parse = parse_json_lines if path.suffix == ".jsonl" else parse_lines
        prompts = [(text, meta) for _, text, meta in parse(read_text(path))]
    except (OSError, ValueError) as error:
        raise SampleSetError(f"{path}: not a file of prompts ({error})") from None
    if len(prompts) != images:
        raise SampleSetError(f"{path}: holds {len(prompts)} prompts for {images} images; give one each")
    return prompts
