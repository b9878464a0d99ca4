"""Links: symbolic links in untrusted folders, and hard links in place of copies."""

import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from kvbench.core.files import check_file


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file to another path, which does not exist, or copy it where the disk has no links."""
    try:
        os.link(source.resolve(), target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(check_file(source), target)


def find_leaving_link(folder: Path, root: Path | None = None, left_out: Collection[str] = ()) -> Path | None:
    """Return the first symbolic link that leaves its folder; None if no link does.

    It is `folder` itself if that is outside `root`, or a link in the folder or below whose target is outside. Files and
    folders directly in it whose names are in `left_out` are skipped.
    """
    home = Path(os.path.realpath(folder))
    if root is not None and not home.is_relative_to(os.path.realpath(root)):
        return folder
    links = _list_links(folder, left_out)
    return next((path for path in links if not Path(os.path.realpath(path)).is_relative_to(home)), None)


def _list_links(folder: Path, left_out: Collection[str] = ()) -> Iterator[Path]:
    """Yield the links in a folder and below, without following them."""
    with os.scandir(folder) as entries:
        ordered = sorted(
            (entry for entry in entries if entry.name not in left_out), key=lambda entry: entry.name
        )
    for entry in ordered:
        if entry.is_symlink():
            yield folder / entry.name
        elif entry.is_dir(follow_symlinks=False):
            yield from _list_links(folder / entry.name)
