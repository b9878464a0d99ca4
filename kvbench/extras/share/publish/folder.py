"""Folder of a publication, which a new publication replaces whole or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbench.core.config import ConfigError
from kvbench.core.files import find_obstacle
from kvbench.data.publication import FILE_LIST, join_names, list_changes


def check_replaceable(out: Path) -> None:
    """Check that a folder can be written, and that it is empty or holds only what a publication wrote.

    Raises:
        ConfigError: the folder cannot be written, or holds other files, which the message names.
    """
    if out.is_symlink():
        raise ConfigError(f"out={out}: is a symbolic link; name its target folder")
    if (problem := find_obstacle(out)) is not None:
        raise ConfigError(f"out={out}: cannot be written ({problem})")
    if not out.exists():
        return
    try:
        changes = [change for change in list_changes(out) if change.how != "missing"]
    except (OSError, ValueError) as error:
        raise ConfigError(f"out={out}: {FILE_LIST} cannot be read ({error}); name a new folder") from None
    foreign = [f"{c.name} (changed)" if c.how == "changed" else c.name for c in changes]
    if foreign:
        raise ConfigError(
            f"out={out}: holds other files than a publication wrote there: {join_names(foreign)}; move them, or name a "
            "new folder"
        )


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Yield a path for a new folder, which replaces an earlier publication at the end, or is removed after an error.

    Remains of a killed publication are removed first, and an earlier publication that it had renamed is restored.

    Raises:
        ConfigError: the earlier folder holds other files.
    """
    new, earlier = (out.with_name(f".{out.name}.kvbench-{part}") for part in ("new", "earlier"))
    if earlier.exists() and not out.exists():  # a process was killed between two renames
        earlier.rename(out)
    check_replaceable(out)
    for left in (new, earlier):
        shutil.rmtree(left, ignore_errors=True)
    try:
        yield new
        if out.exists():
            check_replaceable(out)  # the folder may have changed since the work began
            out.rename(earlier)
        new.rename(out)
    finally:
        if earlier.exists() and not out.exists():
            earlier.rename(out)
        for left in (new, earlier):
            shutil.rmtree(left, ignore_errors=True)
