"""Finished runs as a dataset for the Hugging Face Hub: a folder with its card, which anyone can load or look at.

published/<name>/
    README.md data/runs.parquet data/samples.parquet images/metadata.parquet images/<model>/<run>/000017.png
    runs/<model>/<run>/{results.json, provenance.json, config.yaml}

Texts lie in texts/ and, whole, in samples.parquet.
"""

import os
import shutil
import uuid
from collections.abc import Iterable, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvbench.core.config import ConfigError
from kvbench.core.files import find_obstacle, hash_values, name_sample
from kvbench.data.frames import runs_df, samples_df
from kvbench.eval.files.samples import SampleSet
from kvbench.eval.files.texts import TextSet, open_samples
from kvbench.report.runs_table import make_rows
from kvbench.report.tables import format_markdown
from kvbench.runs.record.kinds import IMAGES, TEXTS
from kvbench.runs.record.results import FILE, Results, read_results

if TYPE_CHECKING:  # of the extra `data`
    import polars

SIGN = Path("data", "runs.parquet")
"""File that marks a folder made here."""
KEPT = (FILE, "provenance.json", "config.yaml", "retention.json")
"""Files of a run that are published as they are."""
LICENCE = "unknown"
"""The Hub's name for an unstated licence."""


class Run(NamedTuple):
    """A finished run and where it is."""

    folder: Path
    results: Results

    @property
    def place(self) -> str:
        """Path of its files in each folder of the dataset, and its `folder` in the tables."""
        return f"{self.folder.resolve().parent.name}/{self.folder.resolve().name}"


def read_published(folders: Sequence[Path]) -> list[Run]:
    """Read finished runs and the references that they were compared with, each once.

    Raises:
        ConfigError: a folder is no finished run, its reference is not beside it, or two have one name.
    """
    found: dict[str, Run] = {}
    for folder in folders:
        run = _read_run(folder, f"publish: {folder}")
        beside = [] if run.results.reference is None else [folder.parent / run.results.reference]
        for one in (
            run,
            *(_read_run(path, f"publish: the reference of {folder}, {path},") for path in beside),
        ):
            if found.setdefault(one.place, one).folder.resolve() != one.folder.resolve():
                raise ConfigError(
                    f"publish: {one.folder} and {found[one.place].folder} are one run; name one of them"
                )
    return list(found.values())


def _read_run(folder: Path, what: str) -> Run:
    results = read_results(folder)
    if results is None:
        raise ConfigError(f"{what} is not a finished run: it has no {FILE}; name folders like runs/MODEL/RUN")
    return Run(folder, results)


def choose_name(runs: Sequence[Run]) -> str:
    """Return a name for a dataset that the same runs always get."""
    first, *others = sorted({run.results.model for run in runs})
    if len(runs) == 1:
        return f"{first}-{runs[0].results.run}"
    return "-".join((first, *others, hash_values(sorted(run.place for run in runs))[:10]))


def prepare_dataset(
    runs: Sequence[Run], out: Path, licence: str | None = None, repo: str | None = None
) -> None:
    """Write the folder of a dataset, whole or not at all; one that was made here before is replaced.

    Args:
        runs: what to publish, at least one; see `read_published`.
        out: the folder.
        licence: of what is published, as the Hub names licences; None where nobody stated it.
        repo: where it will lie on the Hub, which its card then says; None if that is not known.

    Raises:
        ConfigError: the folder cannot be written, holds other files, or packages are missing.
        SampleSetError: samples are missing or are not those that were recorded.
    """
    _check_packages()
    if (problem := find_obstacle(out)) is not None:
        raise ConfigError(f"out={out}: cannot be written ({problem})")
    if out.exists() and any(out.iterdir()) and not (out / SIGN).is_file():
        raise ConfigError(f"out={out}: holds other files; name a new folder")
    beside = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    try:
        _fill(beside, runs)
        (beside / "README.md").write_text(write_card(runs, licence or LICENCE, repo), encoding="utf-8")
        if out.exists():
            shutil.rmtree(out)
        beside.rename(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _check_packages() -> None:
    missing = [name for name in ("polars", "jinja2") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f'publish: not installed: {", ".join(missing)}; pip install "kvbench[data,dashboard]"'
        )


def _fill(out: Path, runs: Sequence[Run]) -> None:
    """Write everything but the card."""
    opened = [(run, open_samples(run.folder)) for run in runs]  # compares every file with its record
    (out / SIGN.parent).mkdir(parents=True)
    frame = _read_runs(runs)
    frame.write_parquet(out / SIGN)
    samples = _read_samples(opened, frame)
    samples.write_parquet(out / SIGN.with_name("samples.parquet"))
    for run, found in opened:
        _copy(out / "runs" / run.place, (run.folder / name for name in KEPT))
        kind = out / found.kind / run.place
        _link(run.folder / found.kind, kind, (name_sample(index, found.suffix) for index in found.indices))
    if (out / IMAGES.kind).is_dir():
        _list_images(samples).write_parquet(out / IMAGES.kind / "metadata.parquet")


def _read_runs(runs: Sequence[Run]) -> "polars.DataFrame":
    """Return the rows that `kvbench.runs_df` has of some runs, without columns that hold nothing of them."""
    import polars

    frames = [runs_df(root) for root in dict.fromkeys(run.folder.resolve().parents[1] for run in runs)]
    whole = polars.concat(frames, how="diagonal_relaxed")
    found = whole.filter(polars.col("folder").is_in([run.place for run in runs]))
    return found.select(column.name for column in found if column.null_count() < len(found))


def _read_samples(opened: Sequence[tuple[Run, SampleSet]], runs: "polars.DataFrame") -> "polars.DataFrame":
    """Return the rows of `kvbench.samples_df`, and for each its run's method and budget, its file and its reference's.

    Args:
        opened: runs and their samples.
        runs: their rows.
    """
    import polars

    whose = runs.select("folder", "model", "method", "budget", "budget_unit")
    places = {
        "folder": [run.place for run, _ in opened],
        "kind": [samples.kind for _, samples in opened],
        "suffix": [samples.suffix for _, samples in opened],
        "against": [
            f"{run.folder.parent.name}/{run.results.reference or run.results.run}" for run, _ in opened
        ],
    }
    names = [polars.format("{}/{}/{}{}", "kind", side, "number", "suffix") for side in ("folder", "against")]
    found = (
        whose.join(samples_df([run.folder for run, _ in opened]), on="folder")
        .join(polars.DataFrame(places), on="folder")
        .with_columns(number=polars.col("index").map_elements(name_sample, polars.String))
        .with_columns(file=names[0], reference_file=names[1])
        .drop("kind", "suffix", "against", "number")
        .sort("folder", "index")
    )
    texts = [
        {"folder": run.place, "index": index, "text": samples.text(index)}
        for run, samples in opened
        if isinstance(samples, TextSet)
        for index in samples.indices
    ]
    return found.join(polars.DataFrame(texts), on=["folder", "index"], how="left") if texts else found


def _list_images(samples: "polars.DataFrame") -> "polars.DataFrame":
    """Return the samples that are images as the Hub's viewer wants them: paths from the folder of images on."""
    import polars

    inside = samples.filter(polars.col("file").str.starts_with(f"{IMAGES.kind}/"))
    paths = [
        polars.col(f"{side}file").str.strip_prefix(f"{IMAGES.kind}/").alias(f"{side}file_name")
        for side in ("", "reference_")
    ]
    return inside.select(*paths, polars.exclude("file", "reference_file"))


def write_card(runs: Sequence[Run], licence: str, repo: str | None) -> str:
    """Return the dataset's card: what the Hub reads of it, what it is, how it was measured and how to load it."""
    import jinja2

    results = [run.results for run in runs]
    kinds = {TEXTS.kind if (run.folder / TEXTS.kind).is_dir() else IMAGES.kind for run in runs}
    place = files("kvbench") / "assets" / "cards" / "dataset.md"
    template = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, autoescape=False
    ).from_string(place.read_text(encoding="utf-8"))
    return template.render(
        licence=licence,
        repo=repo,
        kinds=sorted(kinds),
        runs=results,
        models=sorted({run.model for run in results}),
        methods=sorted({run.method for run in results}),
        prompts=sorted({run.prompts_label for run in results}),
        origins=list(dict.fromkeys(_describe_origin(run) for run in results)),
        table=format_markdown(make_rows(results)),
    )


def _describe_origin(run: Results) -> str:
    """Return in words what a run's provenance says of its code and machine."""
    known = run.provenance or {}
    code, versions = known.get("code"), known.get("versions")
    commit = str(code.get("commit")) if isinstance(code, dict) else "not known"
    changed = " with local changes" if isinstance(code, dict) and code.get("diff_sha256") else ""
    torch = versions.get("torch") if isinstance(versions, dict) else "?"
    machine = known.get("gpu") or known.get("cpu") or "?"
    return f"commit `{commit}`{changed}, torch {torch}, on {machine} (`device={known.get('device', '?')}`)"


def _copy(folder: Path, paths: Iterable[Path]) -> None:
    folder.mkdir(parents=True)
    for path in paths:
        if path.is_file():
            shutil.copyfile(path, folder / path.name)


def _link(source: Path, target: Path, names: Iterable[str]) -> None:
    """Put files of a folder into a new one without taking room where the disk allows."""
    for name in names:
        path, place = source / name, target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, place)
        except OSError:  # another disk, or one without links
            shutil.copyfile(path, place)
