"""`--version`: version of kvbench and the commit of its checkout."""

import os
import subprocess
from pathlib import Path

from kvbench import __version__

COMMIT_VARIABLE = "KVBENCH_COMMIT"
"""Environment variable with the commit that a container image was built from."""


def describe_version() -> str:
    """Return the version, with the commit if it is known and whether files that git tracks differ from it."""
    commit = os.environ.get(COMMIT_VARIABLE) or _describe_checkout(Path(__file__).resolve().parents[2])
    return f"kvbench {__version__}" + (f" (commit {commit})" if commit else "")


def _describe_checkout(root: Path) -> str | None:
    """Return the commit of the checkout at `root`; None if there is none, or no git."""
    if not (root / ".git").exists():
        return None
    words = (
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--exclude=*",
        "--abbrev=12",
        "--dirty=, with changes",
    )
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
