"""Finished runs as a dataset for the Hugging Face Hub: a folder of tables and samples with a dataset card.

published/<name>/
    README.md SHA256SUMS dashboard.html data/runs.parquet data/samples.parquet
    images/metadata.parquet images/<model>/<run>/000017.png
    runs/<model>/<run>/{results.json, provenance.json, config.yaml, code.json, samples.jsonl}

Generated texts are stored in texts/ and in samples.parquet, scored texts in readings/ without hidden states.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvbench.core.config import ConfigError
from kvbench.core.files import check_file, hash_path, hash_values, name_sample
from kvbench.core.links import find_leaving_link, link_or_copy
from kvbench.data.frames import frame_runs, samples_df, write_frame
from kvbench.data.publication import RUNS_FILE, SAMPLES_FILE, write_file_list
from kvbench.eval.files.kinds import IMAGES, find_stored_kind, open_samples
from kvbench.eval.files.readings import ReadingSet
from kvbench.eval.files.samples import SampleSet
from kvbench.eval.files.texts import TextSet
from kvbench.extras.share.publish.folder import replacing
from kvbench.forced.record import ScoredText
from kvbench.report.code_notes import describe_digests
from kvbench.report.runs_table import make_rows
from kvbench.report.tables import escape_markdown, format_markdown
from kvbench.runs.record.folder import LOGS, RECORDS, read_records
from kvbench.runs.record.results import FILE, Results
from kvbench.runs.record.samples import read_finished

if TYPE_CHECKING:  # these packages belong to extras
    import polars
    from huggingface_hub import DatasetCardData

CARD = "README.md"
RUN_FILES = (FILE, "provenance.json", "config.yaml", "retention.json", "code.json")
"""Files of a run that are published unchanged."""
PAGE = "dashboard.html"
"""File name of the page of the runs, with images."""
UNKNOWN_LICENCE = "unknown"
"""Identifier of the Hub for an unstated licence."""


class PublishedRun(NamedTuple):
    """A finished run and its folder."""

    folder: Path
    results: Results

    @property
    def path(self) -> str:
        """Path of the run in each folder of the dataset, which is `folder` in the tables."""
        return "/".join(self.folder.resolve().parts[-2:])


def read_published(folders: Sequence[Path]) -> list[PublishedRun]:
    """Read finished runs and the references that they were compared with, each once.

    Raises:
        ConfigError: a folder is not a finished run, its reference is not beside it, two runs have the same name, or a
            symbolic link leaves a run's folder.
    """
    runs: dict[str, PublishedRun] = {}
    for folder in folders:
        pair = [_read_run(folder, f"publish: {folder}")]
        if (reference := pair[0].results.reference) is not None:
            path = folder.parent / reference
            if path.is_symlink():
                raise ConfigError(
                    f"publish: the reference of {folder}, {path}, is a symbolic link; name its runs"
                )
            pair.append(_read_run(path, f"publish: the reference of {folder}, {path},"))
        for run in pair:
            other = runs.setdefault(run.path, run).folder
            if other.resolve() != run.folder.resolve():
                raise ConfigError(f"publish: {run.folder} and {other} are one run; name one of them")
    return list(runs.values())


def _read_run(folder: Path, what: str) -> PublishedRun:
    results = read_finished(folder)
    if results is None:
        raise ConfigError(f"{what} is not a finished run: it has no {FILE}; name folders like runs/MODEL/RUN")
    if (link := find_leaving_link(folder, left_out=[LOGS])) is not None:
        raise ConfigError(
            f"{what}: {link} is a symbolic link that leaves the run's folder; remove it or copy its file"
        )
    return PublishedRun(folder, results)


def choose_name(runs: Sequence[PublishedRun]) -> str:
    """Return a name for a dataset that depends only on its runs."""
    first, *others = sorted({run.results.model for run in runs})
    if len(runs) == 1:
        return f"{first}-{runs[0].results.run}"
    return "-".join((first, *others, hash_values(sorted(run.path for run in runs))[:10]))


def prepare_dataset(
    runs: Sequence[PublishedRun],
    out: Path,
    licence: str | None = None,
    repo: str | None = None,
    make_page: Callable[[], str] | None = None,
    *,
    author: str | None = None,
) -> None:
    """Write the folder of a dataset, whole or not at all; an earlier dataset is replaced, other files never.

    The card names the licence, the author and the dataset's repository on the Hub, if they are not None. `make_page`
    returns the content of dashboard.html.

    Raises:
        ConfigError: the folder cannot be written, or holds other files.
        SampleSetError: samples are missing or do not match their records.
    """
    with replacing(out) as folder:
        _fill(folder, runs)
        card = write_card(runs, licence or UNKNOWN_LICENCE, repo, author)
        (folder / CARD).write_text(card, encoding="utf-8")
        if make_page is not None:
            (folder / PAGE).write_text(make_page(), encoding="utf-8")
        write_file_list(folder)


def _fill(out: Path, runs: Sequence[PublishedRun]) -> None:
    """Write the tables, and the files and samples of every run."""
    import polars

    opened = [(run, open_samples(run.folder)) for run in runs]  # compares each file with its record
    frame = read_runs({run.path: run.results for run in runs})
    samples = _read_samples(opened, frame)
    has_images = any(stored.kind == IMAGES.kind for _, stored in opened)
    # `datasets` reads all configurations of a card like the first; a folder of images has a column of file names.
    added = {"image_file_name": polars.lit(None, polars.String)} if has_images else {}
    for path, table in ((RUNS_FILE, frame), (SAMPLES_FILE, samples)):
        write_frame(table.with_columns(**added), out / path)
    for run, stored in opened:
        _copy(out / "runs" / run.path, (run.folder / name for name in RUN_FILES))
        target = out / stored.kind / run.path
        names = [name_sample(index, stored.suffix) for index in stored.indices]
        is_full = isinstance(stored, ReadingSet) and run.results.reference is None
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (_strip if is_full else link_or_copy)(run.folder / stored.kind / name, target / name)
        _write_records(run.folder, out / "runs" / run.path, [target / name for name in names])
    if has_images:
        write_frame(_list_images(samples), out / IMAGES.kind / "metadata.parquet")


def read_runs(runs: Mapping[str, Results]) -> "polars.DataFrame":
    """Return the rows of `kvbench.runs_df` for some runs by their paths, without empty columns."""
    rows = frame_runs(dict(sorted(runs.items())))
    return rows.select(column.name for column in rows if column.null_count() < len(rows))


def _read_samples(
    opened: Sequence[tuple[PublishedRun, SampleSet]], runs: "polars.DataFrame"
) -> "polars.DataFrame":
    """Return the rows of `kvbench.samples_df` with method and budget of the run, file and reference file."""
    import polars

    settings = runs.select("folder", "model", "method", "budget", "budget_unit")
    files = [row for run, samples in opened for row in _list_files(run, samples)]
    return (
        settings.join(samples_df([run.folder for run, _ in opened]), on="folder")
        .join(polars.DataFrame(files, infer_schema_length=None), on=["folder", "index"])
        .sort("folder", "index")
    )


def _list_files(run: PublishedRun, samples: SampleSet) -> Iterator[dict[str, object]]:
    """Yield the file and the reference's file of each sample by run and index, and the text of a generated text."""
    reference = f"{run.folder.parent.name}/{run.results.reference or run.results.run}"
    for index in samples.indices:
        name = name_sample(index, samples.suffix)
        paths = [f"{samples.kind}/{folder}/{name}" for folder in (run.path, reference)]
        row = {"folder": run.path, "index": index, "file": paths[0], "reference_file": paths[1]}
        yield row | ({"text": samples.text(index)} if isinstance(samples, TextSet) else {})


def _list_images(samples: "polars.DataFrame") -> "polars.DataFrame":
    """Return the image samples for the Hub's viewer, with paths relative to the folder of images."""
    import polars

    inside = samples.filter(polars.col("file").str.starts_with(f"{IMAGES.kind}/"))
    paths = [
        polars.col(f"{side}file").str.strip_prefix(f"{IMAGES.kind}/").alias(f"{side}file_name")
        for side in ("", "reference_")
    ]
    return inside.select(*paths, polars.exclude("file", "reference_file"))


def write_card(
    runs: Sequence[PublishedRun], licence: str, repo: str | None, author: str | None = None
) -> str:
    """Return the dataset card: metadata for the Hub, contents, provenance and how to load it."""
    from huggingface_hub import DatasetCard

    results = [run.results for run in runs]
    kinds = sorted({(find_stored_kind(run.folder) or IMAGES).kind for run in runs})
    models = sorted({run.model for run in results})
    origins = dict.fromkeys(_describe_origin(run) for run in results)
    card = DatasetCard.from_template(
        _describe_card(models, kinds, licence, author),
        template_path=str(files("kvbench") / "assets" / "cards" / "dataset.md"),
        licence=licence,
        publisher=None if author is None else escape_markdown(author),
        repo=repo,
        kinds=kinds,
        runs=results,
        models=[escape_markdown(model) for model in models],
        methods=[escape_markdown(method) for method in sorted({run.method for run in results})],
        prompts=[escape_markdown(label) for label in sorted({run.prompts_label for run in results})],
        origins=[*origins, *filter(None, [describe_digests(results)])],
        table=format_markdown(make_rows(results)),
    )
    return str(card)


def _describe_card(
    models: Sequence[str], kinds: Sequence[str], licence: str, author: str | None
) -> "DatasetCardData":
    """Return the metadata of a card that the Hub reads."""
    from huggingface_hub import DatasetCardData

    has_images = IMAGES.kind in kinds
    named = [(IMAGES.kind, f"{IMAGES.kind}/**")] if has_images else []
    named += [(table.stem, table.as_posix()) for table in (SAMPLES_FILE, RUNS_FILE)]
    configs: list[dict[str, object]] = [{"config_name": name, "data_files": path} for name, path in named]
    if has_images:
        for config, table in zip(configs[1:], (SAMPLES_FILE, RUNS_FILE), strict=True):
            config["metadata_filenames"] = [table.name]
    return DatasetCardData(
        license=licence,
        author=author,
        pretty_name=f"KV-cache compression of {', '.join(models)}",
        tags=["kvbench", "kv-cache", "benchmark", *models],
        configs=configs,
    )


def _describe_origin(run: Results) -> str:
    """Describe code, versions and machine of a run in Markdown."""
    known = run.provenance or {}
    code, versions = known.get("code"), known.get("versions")
    commit = str(code.get("commit")) if isinstance(code, dict) else "not known"
    changed = " with local changes" if isinstance(code, dict) and code.get("diff_sha256") else ""
    torch = versions.get("torch") if isinstance(versions, dict) else "?"
    machine = known.get("gpu") or known.get("cpu") or "?"
    commit, torch, machine, device = (
        escape_markdown(str(value)) for value in (commit, torch, machine, known.get("device", "?"))
    )
    return f"commit `{commit}`{changed}, torch {torch}, on {machine} (`device={device}`)"


def _copy(folder: Path, paths: Iterable[Path]) -> None:
    folder.mkdir(parents=True)
    for path in paths:
        if path.is_file():
            shutil.copyfile(check_file(path), folder / path.name)


def _write_records(run: Path, target: Path, samples: Sequence[Path]) -> None:
    """Write the records of a run with the hashes of its published samples, in the order of their indices."""
    records = zip(read_records(run).values(), samples, strict=True)
    lines = (json.dumps({**record, "sha256": hash_path(path)}) + "\n" for record, path in records)
    (target / RECORDS).write_text("".join(lines), encoding="utf-8")


def _strip(source: Path, target: Path) -> None:
    """Write a text scored under the full cache without its hidden states, which are large."""
    target.write_bytes(ScoredText.read(source).encode())
