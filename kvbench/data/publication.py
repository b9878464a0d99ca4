"""Folder of a publication: the list of its files, and its replacement by a new one."""

import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from kvbench.core.config import ConfigError
from kvbench.core.files import find_obstacle, hash_path, hash_values, read_text

FILE_LIST = "SHA256SUMS"
"""List of all other files of a publication, which `sha256sum -c` checks."""
RUNS_FILE = Path("data", "runs.parquet")
SAMPLES_FILE = RUNS_FILE.with_name("samples.parquet")
MAX_SHOWN = 3


def write_file_list(folder: Path) -> None:
    """Write the list of the files of a folder with their hashes."""
    lines = (f"{hash_path(folder / name)}  {name}\n" for name in _list_files(folder))
    (folder / FILE_LIST).write_text("".join(lines), encoding="utf-8")


def check_replaceable(out: Path) -> None:
    """Check that a folder can be written, and that it is empty or holds only what a publication wrote.

    Raises:
        ConfigError: names the files that would be lost, or why the folder cannot be written.
    """
    if out.is_symlink():
        raise ConfigError(f"out={out}: is a symbolic link; name the folder itself")
    if (problem := find_obstacle(out)) is not None:
        raise ConfigError(f"out={out}: cannot be written ({problem})")
    if not out.exists():
        return
    try:
        foreign = list_foreign(out)
    except (OSError, ValueError) as error:
        raise ConfigError(f"out={out}: {FILE_LIST} cannot be read ({error}); name a new folder") from None
    if foreign:
        shown = join_names(foreign)
        raise ConfigError(
            f"out={out}: holds other files than a publication wrote there: {shown}; move them, or name a new folder"
        )


def join_names(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others, as text."""
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more


def replace_folder(new: Path, out: Path) -> None:
    """Put a new folder in the place of an earlier publication, which is removed when the new one is there.

    Raises:
        ConfigError: the earlier folder holds other files.
    """
    if not out.exists():
        new.rename(out)
        return
    check_replaceable(out)  # something may have come since the work began
    earlier = new.with_name(f"{new.name}.earlier")
    out.rename(earlier)
    try:
        new.rename(out)
    except BaseException:
        earlier.rename(out)
        raise
    shutil.rmtree(earlier)


def list_foreign(folder: Path) -> list[str]:
    """Return the files of a publication that are not in its list, or changed since they were listed.

    Raises:
        OSError, ValueError: the list cannot be read.
    """
    return list(_list_foreign(folder, _read_file_list(folder)))


def list_lost(folder: Path) -> list[str]:
    """Return the listed files that a publication lacks.

    Raises:
        OSError, ValueError: the list cannot be read.
    """
    own = set(_list_files(folder))
    return [name for name in _read_file_list(folder) if name not in own]


def list_changed(folder: Path, parts: Collection[str]) -> list[str]:
    """Return the files in some parts of a publication that its list does not have, or that are not as listed.

    A listed name that is not of a file in the folder, such as `runs/../..`, counts as changed and is not opened.

    Args:
        folder: folder of the publication.
        parts: files and folders directly in it.

    Raises:
        OSError, ValueError: the list, or a file, cannot be read.
    """
    known, own = _read_file_list(folder), set(_list_files(folder))
    names = {name for name in (*known, *own) if name.partition("/")[0] in parts}
    return [
        name for name in sorted(names) if name not in own or not _is_as_listed(folder / name, known.get(name))
    ]


def hash_publication(folder: Path) -> str:
    """Return the hash of the names and contents of a publication's own files, whatever its list says of them."""
    return hash_values([(name, _hash_plain(folder / name)) for name in _list_files(folder)])


def _hash_plain(path: Path) -> str | None:
    """Return the hash of a file; None for a link, and for what cannot be read."""
    try:
        return None if path.is_symlink() else hash_path(path)
    except OSError:
        return None


def _is_as_listed(path: Path, digest: str | None) -> bool:
    return not path.is_symlink() and path.is_file() and hash_path(path) == digest


def _list_files(folder: Path) -> Iterator[str]:
    """Yield the files and links of a folder and below in order, without the list itself."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for name in sorted([*names, *links]):
            path = Path(parent, name).relative_to(folder).as_posix()
            if path != FILE_LIST:
                yield path


def _read_file_list(folder: Path) -> dict[str, str]:
    """Return the hashes of a publication's files by name; none for other folders."""
    path = folder / FILE_LIST
    if path.is_symlink() or not path.is_file():
        return {}
    lines = read_text(path).splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def _list_foreign(folder: Path, known: Mapping[str, str]) -> Iterator[str]:
    """Yield the files that are not listed, or changed since they were."""
    if not known and (folder / FILE_LIST).exists():
        yield FILE_LIST
    for name in _list_files(folder):
        path = folder / name
        if path.is_symlink() or not path.is_file() or name not in known:
            yield name
        elif hash_path(path) != known[name]:
            yield f"{name} (changed)"
