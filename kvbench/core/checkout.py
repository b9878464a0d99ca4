"""Git checkout from which kvbench runs, if it runs from one."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Folder of the checkout, or of installed packages."""
COMMIT_VARIABLE = "KVBENCH_COMMIT"
"""Environment variable with the commit that a container image was built from."""


def find_built_commit() -> str | None:
    """Return the commit that a container image was built from; None outside such an image."""
    return os.environ.get(COMMIT_VARIABLE) or None


def run_git(*arguments: str) -> str | None:
    """Return the output of a git command in the checkout; None without a checkout, or if git fails."""
    if not (ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, errors="replace"
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout
