"""Files of a publication, and their list with hashes, to which any copy can be compared."""

import os
from collections.abc import Collection, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from kvbench.core.config import ConfigError
from kvbench.core.files import hash_path, hash_values, read_text

FILE_LIST = "SHA256SUMS"
"""List of all other files of a publication, which `sha256sum -c` checks."""
RUNS_FILE = Path("data", "runs.parquet")
SAMPLES_FILE = RUNS_FILE.with_name("samples.parquet")
MAX_SHOWN = 3
"""Maximum number of names in a message."""


class FileChange(NamedTuple):
    """File of a publication that differs from the list of files."""

    name: str
    how: Literal["changed", "not listed", "missing"]


def check_packages() -> None:
    """Check that the packages that write a publication are installed.

    Raises:
        ConfigError: a package is missing; the message names all.
    """
    if missing := ", ".join(
        name for name in ("polars", "jinja2", "huggingface_hub") if find_spec(name) is None
    ):
        raise ConfigError(f'publish: not installed: {missing}; pip install "kvbench[data,dashboard,text]"')


def write_file_list(folder: Path) -> None:
    """Write the list of the files of a folder with their hashes."""
    lines = (f"{hash_path(folder / name)}  {name}\n" for name in _list_files(folder))
    (folder / FILE_LIST).write_text("".join(lines), encoding="utf-8")


def join_names(names: Sequence[str]) -> str:
    """Return the first `MAX_SHOWN` names, and the number of other names, as a string."""
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more


def list_changes(folder: Path, parts: Collection[str] | None = None) -> list[FileChange]:
    """Return the files that differ from the list of a publication; all files of a folder without a list.

    A listed name outside the folder, such as `runs/../..`, counts as missing and is not opened. `parts` are the files
    and folders directly in `folder` that are compared; None for all.

    Raises:
        OSError, ValueError: the list or a file cannot be read.
    """
    known, present = _read_file_list(folder), set(_list_files(folder))
    changes = []
    for name in sorted({*known, *present}):
        if parts is None or name.partition("/")[0] in parts:
            if name not in present:
                changes.append(FileChange(name, "missing"))
            elif name not in known:
                changes.append(FileChange(name, "not listed"))
            elif (folder / name).is_symlink() or hash_path(folder / name) != known[name]:
                changes.append(FileChange(name, "changed"))
    return changes


def hash_publication(folder: Path) -> str:
    """Return the hash of the names and contents of a publication's files, except its list of files."""
    return hash_values([(name, _hash_plain(folder / name)) for name in _list_files(folder)])


def _hash_plain(path: Path) -> str | None:
    """Return the hash of a file; None for a link or a file that cannot be read."""
    try:
        return None if path.is_symlink() else hash_path(path)
    except OSError:
        return None


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
    """Return the listed hashes of a publication's files by name; none without a list."""
    path = folder / FILE_LIST
    if path.is_symlink() or not path.is_file():
        return {}
    lines = read_text(path).splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
