"""Base of loggers: what is sent about a run and about a sweep; a failure to send loses nothing."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from kvbench.core.config import ConfigError, check_rules
from kvbench.core.files import hash_content, read_text
from kvbench.eval.files.kinds import IMAGES, TEXTS, find_stored_kind
from kvbench.eval.files.pictures import open_picture
from kvbench.eval.files.samples import read_samples
from kvbench.runs.record.folder import slug
from kvbench.runs.record.results import Results
from kvbench.runs.record.samples import find_sample, order_worst_first, read_scores

MAX_NAME = 64
"""Maximum number of characters of a tag; ids, names and groups are kept as short."""
MAX_SHOWN = 200
"""Maximum number of characters of a scored text in the table of samples."""
HEAD = 36
"""Characters of a long name that stay in front of its hash."""
LoggedValue = float | int | str | None
Send = Callable[[dict[str, Any]], object]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tracker(ABC):
    """Base class of loggers, which send finished runs and sweeps to a service; a subclass implements `open`.

    Every entry is new: a run of the service that the calling program has open stays open.

    Attributes:
        project: project name.
        name: beginning of the names of new entries, so that earlier entries are kept; None for the runs' names alone.
        images: samples of a run to send with the reference's, the most changed first; 0 for none.
    """

    package: ClassVar[str]
    """Package of the service, and the extra that installs it."""

    project: str = "kvbench"
    name: str | None = None
    images: int = 32

    def __post_init__(self) -> None:
        rules = (
            ("images", self.images < 0, "must be at least 0"),
            ("project", not self.project.strip(), "must be a name"),
            ("name", self.name is not None and not slug(self.name), "must have a letter or digit"),
        )
        check_rules(rules, self, "logger.")

    @classmethod
    def check_installed(cls) -> None:
        """Raise ConfigError if the extra is not installed."""
        if find_spec(cls.package) is None:
            raise ConfigError(f'logger={cls.package}: not installed; pip install "kvbench[{cls.package}]"')

    @abstractmethod
    def check(self) -> None:
        """Check before any work what the service refuses, settings of its environment variables included.

        Raises:
            ConfigError: the service refuses a setting, which the message names, or the extra is not installed.
        """

    @abstractmethod
    def open(
        self, folder: Path, key: str, title: str, group: str | None, about: Mapping[str, Any]
    ) -> AbstractContextManager[Send]:
        """Open an entry, which is finished when the block ends; the service may write to the folder.

        Args:
            folder: folder of the run or the sweep.
            key: identity of the entry; an entry that is sent again has the same key.
            title: shown name.
            group: name of the sweep; None for a run by itself.
            about: `job_type` (method of a run, or `sweep`), `config` and `tags`.

        Returns:
            A function that sends values by name.
        """

    def show_page(self, module: Any, page: Path) -> object | None:
        """Return an HTML file as a value of an entry; None if the service shows no HTML."""
        return None

    def send(self, folder: Path, results: Results, sweep: str | None = None) -> None:
        """Send or update the results, contact sheet and samples of a run, grouped by the name of its sweep.

        Raises:
            ConfigError: the extra is not installed.
        """
        self.check_installed()
        tags = (results.model_label, results.prompts_label, f"budget {results.budget_text}")
        config = {**results.config, "reference": results.reference}
        shown = [shorten(tag) for tag in tags if tag]
        about = {"job_type": shorten(results.method), "config": config, "tags": shown}
        name, module = self._prefix(results.run), import_module(self.package)
        with self.open(folder, name, name, sweep and shorten(sweep), about) as send:
            values: dict[str, object] = {k: v for k, v in list_numbers(results).items() if v is not None}
            sheet = folder / "contact_sheet.png"
            if sheet.is_file():
                values["contact_sheet"] = module.Image(str(sheet))
            if self.images:
                values["samples"] = _make_sample_table(module, folder, results, self.images)
            send(values)

    def send_sweep(self, folder: Path, name: str, runs: Sequence[Results], page: Path | None) -> None:
        """Send the table of a sweep's finished runs, and its dashboard (an HTML file), as an entry of their group.

        Raises:
            ConfigError: the extra is not installed.
        """
        self.check_installed()
        rows = [list_numbers(run) for run in runs]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        data = [[row.get(column) for column in columns] for row in rows]
        key, module = self._prefix(f"sweep-{folder.name}"), import_module(self.package)
        with self.open(folder, key, self._prefix(name), shorten(name), {"job_type": "sweep"}) as send:
            shown: dict[str, object] = {"runs": module.Table(columns=columns, data=data)}
            if page is not None and (value := self.show_page(module, page)) is not None:
                shown["dashboard"] = value
            send(shown)

    def _prefix(self, name: str) -> str:
        return name if self.name is None else f"{self.name}-{name}"


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


def _make_sample_table(module: Any, folder: Path, results: Results, count: int) -> Any:
    """Return a table of a run's samples and the reference's, the most changed first.

    Scored texts are shown by their beginnings, which are their prompts.
    """
    samples, scores = read_samples(folder / "samples.jsonl"), read_scores(folder, results)
    order = [*order_worst_first(results, scores), *(index for index in samples if index not in scores)]
    names = list(dict.fromkeys(name for one in scores.values() for name in one))
    sides = _list_sides(folder, results)
    rows: list[list[object]] = []
    for index in order[:count]:
        shown = [_show_sample(module, side, index) for side in sides.values()]
        values: Mapping[str, float | None] = scores.get(index, {})
        prompt = samples[index].prompt
        if "sample" not in sides and len(prompt) > MAX_SHOWN:
            prompt = f"{prompt[:MAX_SHOWN]} …"
        rows.append([index, prompt, *shown, *(values.get(name) for name in names)])
    return module.Table(columns=["index", "prompt", *sides, *names], data=rows)


def _list_sides(folder: Path, results: Results) -> dict[str, Path]:
    """Return the folders whose samples are shown, by column; none for samples that are neither images nor texts."""
    if find_stored_kind(folder) not in (IMAGES, TEXTS):
        return {}
    reference = {} if results.reference is None else {"reference": folder.parent / results.reference}
    return {"sample": folder, **reference}


def _show_sample(module: Any, folder: Path, index: int) -> object:
    path = find_sample(folder, index)
    if find_stored_kind(folder) is TEXTS:
        return read_text(path)
    with open_picture(path):  # the package would open any format
        return module.Image(str(path))


def check_logger(logger: object) -> None:
    """Call a logger's method `check`, if it has one.

    Raises:
        ConfigError: the logger refuses its settings.
    """
    if (check := getattr(logger, "check", None)) is not None:
        check()


@contextmanager
def reporting_failure(entry: str) -> Iterator[None]:
    """Log an error of a block that sends an entry, in one line; what was generated and scored is on disk."""
    try:
        yield
    except Exception as error:  # every service raises its own classes
        reason = " ".join((str(error) or type(error).__name__).split())
        log.warning(
            "%s was not sent: %s; it is finished and kept: repeat the command to send it", entry, reason
        )
