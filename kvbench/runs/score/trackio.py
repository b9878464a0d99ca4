"""Logger for trackio, which keeps its entries on this machine or in a Space of the Hugging Face Hub."""

import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvbench.core.config import ConfigError
from kvbench.runs.record.folder import slug
from kvbench.runs.score.tracker import Send, Tracker, shorten

log = logging.getLogger(__name__)

SPACE = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


@dataclass(frozen=True)
class Trackio(Tracker):
    """Logger of finished runs and sweeps to trackio; `trackio show` opens them.

    Attributes:
        space: Space of the Hub that shows the entries, `owner/name` or `name`; None keeps them on this machine.
    """

    package: ClassVar[str] = "trackio"

    space: str | None = None

    def check(self) -> None:
        """Check the Space's name, and that there is a token to write to it.

        Raises:
            ConfigError: the name is malformed, the Hub's token is missing, or the `trackio` extra is not installed.
        """
        self.check_installed()
        from huggingface_hub import get_token

        keys = {"logger.space": self.space, "TRACKIO_SPACE_ID": os.environ.get("TRACKIO_SPACE_ID")}
        key, space = next(((key, value) for key, value in keys.items() if value is not None), ("", None))
        if space is None:
            return
        if SPACE.fullmatch(space) is None:
            raise ConfigError(f"{key}={space!r}: must be a Space of the Hub, owner/name")
        if get_token() is None:
            raise ConfigError(
                f"{key}={space}: the Hub knows no user here; run `hf auth login`, or set HF_TOKEN"
            )

    @contextmanager
    def open(
        self, folder: Path, key: str, title: str, group: str | None, about: Mapping[str, Any]
    ) -> Iterator[Send]:
        """Open an entry of the project, which is finished when the block ends.

        trackio finishes the run that is current in its context, so the entry has a context of its own. What it prints
        goes to standard error. The value `run`, a reserved name there, is the name of the entry.
        """
        import trackio

        context, config = Context(), trackio.config
        others = {name: value for name, value in about.items() if name != "config"}
        with redirect_stdout(sys.stderr):
            run = context.run(
                trackio.init,
                project=self.project,
                name=shorten(slug(key)),
                group=group,
                space_id=self.space,
                config={**about.get("config", {}), "title": title, **others},
                resume="allow",
                embed=False,
                auto_log_gpu=False,  # the run has ended: nothing to measure
                auto_log_cpu=False,
            )
            try:
                yield lambda values: context.run(run.log, {k: v for k, v in values.items() if k != "run"})
            finally:
                context.run(run.finish)
                trackio.config = config
        log.info("sent to trackio: %s", key)
