"""Use of a run's logger: its check before any work, and entries whose failure loses nothing."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


def check_logger(logger: object) -> None:
    """Call a logger's method `check`, if it has one.

    Raises:
        ConfigError: the logger refuses its settings.
    """
    check = getattr(logger, "check", None)
    if check is not None:
        check()


@contextmanager
def reporting_failure(entry: str) -> Iterator[None]:
    """Log an error of a block that sends an entry, in one line; what was generated and scored is on disk."""
    try:
        yield
    except Exception as error:  # every tracker has its own
        reason = " ".join((str(error) or type(error).__name__).split())
        log.warning(
            "%s was not sent: %s; it is finished and kept: repeat the command to send it", entry, reason
        )
