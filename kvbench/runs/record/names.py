"""Names of folders that a run's record contains."""

from pathlib import PurePosixPath


def is_folder_name(name: str) -> bool:
    """Return whether a text names an entry of a folder: without slashes and null characters, not `.` or `..`."""
    return PurePosixPath(name).name == name and name not in ("", ".", "..") and "\0" not in name
