"""Times at which this process imported its modules: it does not execute later edits."""

import sys
import time

STARTED = time.time_ns()
"""Time in nanoseconds at which kvbench was imported; modules that were loaded before count as imported then."""
_BEGUN: dict[str, int] = {}


class _NotingFinder:
    """First finder of `sys.meta_path`: notes when an import begins; later finders do the search."""

    def find_spec(self, name: str, *_: object) -> None:
        """Note the time, and find nothing."""
        _BEGUN[name] = time.time_ns()


def note_imports() -> None:
    """Begin to note the times of imports; a second call changes nothing."""
    if not any(isinstance(finder, _NotingFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _NotingFinder())


def find_import_time(module: str) -> int:
    """Return the time in ns at which the import of a loaded module began; `STARTED` if it was not noted."""
    return _BEGUN.get(module, STARTED)
