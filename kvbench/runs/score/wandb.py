"""Logger for Weights & Biases."""

import logging
import netrc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvbench.core.config import ConfigError
from kvbench.core.files import hash_content
from kvbench.eval.files.kinds import IMAGES, TEXTS, find_stored_kind
from kvbench.eval.files.samples import read_samples
from kvbench.runs.record.folder import slug
from kvbench.runs.record.results import Results
from kvbench.runs.record.samples import find_sample, order_worst_first, read_scores

log = logging.getLogger(__name__)

MAX_NAME = 64
"""Most characters of a tag; ids, names and groups are kept as short."""
MAX_SHOWN = 200
"""Characters of a text that was read, in the table of samples."""
HEAD = 36
"""Characters of a long name before its hash."""
LoggedValue = float | int | str | None


@dataclass(frozen=True)
class WandB:
    """Sends finished runs and sweeps to Weights & Biases; offline without a key.

    Attributes:
        project: project name.
        entity: team or user, None for the default.
        name: beginning of the names of new entries, beside those of earlier names; None for the runs' names alone.
        images: samples of a run to send with the reference's, the most changed first; 0 for none.
    """

    project: str = "kvbench"
    entity: str | None = None
    name: str | None = None
    images: int = 32

    def __post_init__(self) -> None:
        if self.images < 0:
            raise ConfigError(f"images={self.images}: must be at least 0")
        if not self.project.strip():
            raise ConfigError("logger.project='': must be a name")
        if self.name is not None and not slug(self.name):
            raise ConfigError(f"logger.name={self.name!r}: must have a letter or digit")

    @staticmethod
    def check_installed() -> None:
        """Raise ConfigError if the `wandb` extra is not installed."""
        if find_spec("wandb") is None:
            raise ConfigError('logger=wandb: not installed; pip install "kvbench[wandb]"')

    def check(self) -> None:
        """Check before any work what W&B refuses, settings of its environment variables included.

        Raises:
            ConfigError: naming what is refused, or the `wandb` extra is not installed.
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

    def send(self, folder: Path, results: Results, sweep: str | None = None) -> None:
        """Send or update the results, contact sheet and samples of a run, grouped by the name of its sweep.

        Raises:
            ConfigError: the `wandb` extra is not installed.
        """
        about = {
            "config": {**results.config, "reference": results.reference},
            "group": sweep,
            "job_type": results.method,
            "tags": [
                shorten(tag)
                for tag in (
                    results.model_label,
                    results.prompts_label,
                    f"budget {results.memory.budget_text}",
                )
                if tag
            ],
        }
        with self._open(folder, results.run, results.run, **about) as (wandb, run):
            values: dict[str, object] = {k: v for k, v in list_numbers(results).items() if v is not None}
            sheet = folder / "contact_sheet.png"
            if sheet.is_file():
                values["contact_sheet"] = wandb.Image(str(sheet))
            if self.images:
                values["samples"] = _make_sample_table(wandb, folder, results, self.images)
            run.log(values)

    def send_sweep(self, folder: Path, name: str, runs: Sequence[Results], page: Path | None) -> None:
        """Send the table of a sweep's finished runs, and its dashboard (an HTML file), as an entry of their group.

        Raises:
            ConfigError: the `wandb` extra is not installed.
        """
        rows = [list_numbers(run) for run in runs]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        data = [[row.get(column) for column in columns] for row in rows]
        about = {"group": name, "job_type": "sweep"}
        with self._open(folder, f"sweep-{folder.name}", name, **about) as (wandb, run):
            table = wandb.Table(columns=columns, data=data)
            shown: dict[str, object] = {"runs": table}
            if page is not None:
                shown["dashboard"] = wandb.Html(page.read_text(encoding="utf-8"), inject=False)
            run.log(shown)

    def _prefix(self, name: str) -> str:
        return name if self.name is None else f"{self.name}-{name}"

    @contextmanager
    def _open(self, folder: Path, key: str, title: str, **about: object) -> Iterator[tuple[Any, Any]]:
        """Yield the module and an entry of the project, which is finished when the block ends."""
        self.check_installed()
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=shorten(self._prefix(title)),
            id=shorten(slug(self._prefix(key))),
            resume="allow" if mode == "online" else None,
            dir=str(folder),
            mode=mode,  # type: ignore[arg-type]
            allow_val_change=True,  # a metric may have come in between
            reinit="finish_previous",
            **{k: shorten(v) if isinstance(v, str) else v for k, v in about.items()},  # type: ignore[arg-type]
        )
        try:
            yield wandb, run
        finally:
            run.finish()
        log.info("sent to W&B (%s): %s", mode, key)


def shorten(name: str) -> str:
    """Return a name of at most `MAX_NAME` characters: its beginning, a hash of all of it, and its end.

    >>> shorten("captions " * 9 + "v2")
    'captions captions captions captions ~9b842f4d~ptions captions v2'
    """
    if len(name) <= MAX_NAME:
        return name
    return f"{name[:HEAD]}~{hash_content(name)[:8]}~{name[HEAD + 10 - MAX_NAME :]}"


def list_numbers(results: Results) -> dict[str, LoggedValue]:
    """Return the names, memory, latency and metrics (with 95 % intervals) of a run."""
    about = {"run": results.run, "model": results.model_label, "method": results.method}
    numbers: dict[str, LoggedValue] = {
        **about,
        "prompts": results.prompts_label,
        "budget": results.memory.budget,
    }
    numbers |= {f"memory/{key}": value for key, value in asdict(results.memory).items()}
    numbers |= {f"latency/{key}": value for key, value in asdict(results.latency).items()}
    for name, metric in results.metrics.items():
        low, high = metric.interval or (None, None)
        numbers |= {name: metric.value, f"{name}/low": low, f"{name}/high": high}
    return numbers


def _make_sample_table(wandb: Any, folder: Path, results: Results, count: int) -> Any:
    """Return a table of a run's samples and the reference's, the most changed first.

    Texts that were read are shown by their beginnings, which are their prompts.
    """
    samples, scores = read_samples(folder / "samples.jsonl"), read_scores(folder, results)
    order = [*order_worst_first(results, scores), *(index for index in samples if index not in scores)]
    names = list(dict.fromkeys(name for one in scores.values() for name in one))
    sides = _list_sides(folder, results)
    table = wandb.Table(columns=["index", "prompt", *sides, *names])
    for index in order[:count]:
        shown = [_show_sample(wandb, side, index) for side in sides.values()]
        values: Mapping[str, float | None] = scores.get(index, {})
        prompt = samples[index].prompt
        if "sample" not in sides and len(prompt) > MAX_SHOWN:
            prompt = f"{prompt[:MAX_SHOWN]} …"
        table.add_data(index, prompt, *shown, *(values.get(name) for name in names))
    return table


def _list_sides(folder: Path, results: Results) -> dict[str, Path]:
    """Return the folders whose samples are shown, by column; none for samples that are neither images nor texts."""
    if find_stored_kind(folder) not in (IMAGES, TEXTS):
        return {}
    reference = {} if results.reference is None else {"reference": folder.parent / results.reference}
    return {"sample": folder, **reference}


def _show_sample(wandb: Any, folder: Path, index: int) -> object:
    path = find_sample(folder, index)
    is_text = find_stored_kind(folder) is TEXTS
    return path.read_text(encoding="utf-8") if is_text else wandb.Image(str(path))


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False
