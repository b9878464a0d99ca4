"""Logger for Weights & Biases (W&B)."""

import logging
import netrc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvbench.core.config import ConfigError
from kvbench.core.files import read_text
from kvbench.runs.record.folder import LOGS, slug
from kvbench.runs.score.tracker import Send, Tracker, shorten

log = logging.getLogger(__name__)

DATA = "WANDB_DATA_DIR"
"""Variable of the folder in which W&B keeps copies of files that it has not sent."""


@dataclass(frozen=True)
class WandB(Tracker):
    """Logger of finished runs and sweeps to Weights & Biases; offline without a key.

    Attributes:
        entity: team or user, None for the default.
    """

    package: ClassVar[str] = "wandb"

    entity: str | None = None

    def check(self) -> None:
        """Check before any work what W&B refuses, settings of its environment variables included.

        Raises:
            ConfigError: W&B refuses a setting, which the message names, or the `wandb` extra is not installed.
        """
        self.check_installed()
        import wandb
        from pydantic import ValidationError

        try:
            settings = wandb.Settings(project=self.project, entity=self.entity)
            settings.update_from_env_vars(dict(os.environ))
        except ValidationError as error:
            first = error.errors()[0]
            name = "WANDB_" + str(first["loc"][0]).removeprefix("run_").upper()
            raise ConfigError(f"logger=wandb: {name}: {first['msg']}") from None
        except wandb.errors.UsageError as error:
            raise ConfigError(f"logger.project={self.project}: {error}") from None

    @contextmanager
    def open(
        self, folder: Path, key: str, title: str, group: str | None, about: Mapping[str, Any]
    ) -> Iterator[Send]:
        """Open an entry of the project, which is finished when the block ends; other entries stay open."""
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        with storing_in(folder / LOGS if mode == "offline" else None):
            run = wandb.init(
                project=self.project,
                entity=self.entity,
                name=shorten(title),
                id=shorten(slug(key)),
                resume="allow" if mode == "online" else None,
                dir=str(folder),
                mode=mode,  # type: ignore[arg-type]
                allow_val_change=True,  # a metric may be new since the entry was sent
                reinit="create_new",  # the caller's own run stays open
                group=group,
                **about,
            )
            try:
                yield run.log
            finally:
                run.finish()
        log.info("sent to W&B (%s): %s", mode, key)

    def show_page(self, module: Any, page: Path) -> object | None:
        """Return the page as W&B's HTML panel."""
        return module.Html(read_text(page), inject=False)


@contextmanager
def storing_in(folder: Path | None) -> Iterator[None]:
    """Keep images of tables, which `wandb sync` sends, in a folder; in W&B's own if None or if the user chose one."""
    if folder is None or DATA in os.environ:
        yield
        return
    os.environ[DATA] = str(folder.absolute())
    try:
        yield
    finally:
        del os.environ[DATA]


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False
