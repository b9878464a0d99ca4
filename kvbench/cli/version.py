"""`--version`: version of kvbench and the commit of its checkout."""

from kvbench.core.checkout import find_built_commit, run_git
from kvbench.version import __version__

DESCRIBE = ("describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=, with changes")


def describe_version() -> str:
    """Return the version, with the commit if it is known and whether files that git tracks differ from it."""
    commit = find_built_commit() or run_git(*DESCRIBE)
    return f"kvbench {__version__}" + (f" (commit {commit.strip()})" if commit else "")
