"""Published runs: what polars and the Hub's own reader of cards find in the folder."""

import json
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub as hub
import polars as pl
import pytest
from PIL import Image

from kvbench.core.config import ConfigError
from kvbench.core.files import hash_content, hash_path
from kvbench.eval.files.samples import SampleSetError
from kvbench.extras.share.publish.dataset import choose_name, prepare_dataset, read_published
from kvbench.forced.record import ScoredText
from kvbench.runs import execute
from kvbench.runs.record.results import Results, read_results
from tests.support.fake_run import job_in
from tests.support.run_folders import write_reading_runs
from tests.support.verification import COUNT


@pytest.fixture
def published(made: Path, tmp_path: Path) -> Path:
    prepare_dataset(read_published([made]), tmp_path / "set", "apache-2.0", "user/name")
    return tmp_path / "set"


def read_tree(folder: Path) -> dict[str, bytes]:
    """Contents of the files in a folder and below by name."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def results_of(folder: Path) -> Results:
    results = read_results(folder)
    assert results is not None
    return results


def test_tables_and_card_hold_what_the_runs_came_to(made: Path, published: Path) -> None:
    results = results_of(made)
    runs = pl.read_parquet(published / "data" / "runs.parquet")
    assert set(runs["run"]) == {results.run, results.reference}
    [row], psnr = runs.filter(run=results.run).rows(named=True), results.metrics["psnr"]
    assert (row["psnr"], row["psnr.low"], row["psnr.high"]) == (psnr.value, *(psnr.ci95 or ()))
    assert row["memory.peak_tokens"] == results.memory.peak_tokens
    samples = pl.read_parquet(published / "data" / "samples.parquet")
    assert len(samples) == 2 * COUNT
    ours = samples.filter(folder=f"fake/{results.run}").sort("index")
    assert ours["prompt"].to_list() == [f"prompt {index}" for index in range(COUNT)]
    lines = (made / "metrics" / "psnr-uint8.samples.jsonl").read_text().splitlines()
    assert ours["psnr"].to_list() == [json.loads(line)["psnr"] for line in lines]
    for row in ours.iter_rows(named=True):
        image = f"images/{row['index']:06d}.png"
        assert (published / row["file"]).read_bytes() == (made / image).read_bytes()
        reference = made.parent / str(results.reference) / image
        assert (published / row["reference_file"]).read_bytes() == reference.read_bytes()
    for name in ("results.json", "provenance.json", "config.yaml"):
        assert (published / "runs" / "fake" / results.run / name).read_bytes() == (made / name).read_bytes()
    card = hub.DatasetCard.load(published / "README.md")
    about = card.data.to_dict()
    assert about["license"] == "apache-2.0"
    assert about["tags"] == ["kvbench", "kv-cache", "benchmark", "fake"]
    places = {one["config_name"]: one["data_files"] for one in about["configs"]}
    assert places == {"images": "images/**", "samples": "data/samples.parquet", "runs": "data/runs.parquet"}
    assert all([*published.glob(place)] for place in places.values())
    assert f"`{(results.provenance or {})['code']['commit']}`" in card.text
    assert "| fake | streaming_llm | 0.5 |" in card.text
    assert 'polars.read_parquet("hf://datasets/user/name/data/runs.parquet")' in card.text
    assert 'load_dataset("user/name", "images", split="train")' in card.text
    [recipe, *_] = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    exec(compile(recipe.replace("hf://datasets/user/name", str(published)), "README.md", "exec"))


def test_folders_of_many_images_stay_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.core.files.FILES_PER_FOLDER", 3)
    run = execute.run(job_in(tmp_path / "runs", count=4)).folder
    prepare_dataset(read_published([run]), tmp_path / "set", "apache-2.0", "user/name")
    listed = pl.read_parquet(tmp_path / "set/images/metadata.parquet")
    assert set(listed["file_name"].filter(listed["file_name"].str.contains("/000003/"))) == {
        f"fake/{results_of(run).run}/000003/000003.png",
        f"fake/{results_of(run).reference}/000003/000003.png",
    }
    there = {str(path.relative_to(tmp_path / "set/images")) for path in (tmp_path / "set").rglob("*.png")}
    assert set(listed["file_name"]) == there
    assert set(listed["reference_file_name"]) < there
    assert listed.columns[:2] == ["file_name", "reference_file_name"]
    assert {"prompt", "method", "psnr"} <= set(listed.columns)


def test_texts_lie_in_the_table(run: Path, tmp_path: Path) -> None:
    for folder in (run, *run.parent.glob("full-*")):
        shutil.rmtree(folder / "images")
        (folder / "texts").mkdir()
        records = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        for record in records:
            path = folder / "texts" / f"{record['index']:06d}.txt"
            path.write_text(f"ein Ökonom {record['index']}")
            record |= {"sha256": hash_path(path), "tokens": 3}
        (folder / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    out = tmp_path / "set"
    prepare_dataset(read_published([run]), out)
    samples = pl.read_parquet(out / "data" / "samples.parquet")
    assert samples["text"].to_list() == [f"ein Ökonom {index}" for index in samples["index"]]
    assert len(samples) == 2 * COUNT
    assert (out / samples["file"][0]).read_text() == samples["text"][0]
    assert not (out / "images").exists()
    about = hub.DatasetCard.load(out / "README.md").data.to_dict()
    assert (about["license"], about.get("author")) == ("unknown", None)
    assert [one["config_name"] for one in about["configs"]] == ["samples", "runs"]


def test_a_dataset_replaces_what_a_publication_wrote(made: Path, published: Path) -> None:
    reference = made.parent / str(results_of(made).reference)
    before = read_tree(published)
    listed = dict(line.split("  ")[::-1] for line in (published / "SHA256SUMS").read_text().splitlines())
    assert listed == {name: hash_content(data) for name, data in before.items() if name != "SHA256SUMS"}
    prepare_dataset(read_published([reference]), published)
    assert not (published / "images" / "fake" / made.name).exists()
    prepare_dataset(read_published([made]), published, "apache-2.0", "user/name")
    assert read_tree(published) == before
    assert [path.name for path in published.parent.iterdir()] == ["set"]


def add_thesis(folder: Path) -> None:
    (folder / "thesis.tex").write_text("three years")


def replace_table(folder: Path) -> None:
    (folder / "data" / "runs.parquet").unlink()
    (folder / "data" / "runs.parquet").symlink_to(folder.parent)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (add_thesis, r"thesis\.tex"),
        (lambda folder: (folder / "README.md").write_text("# Mine"), r"README\.md \(changed\)"),
        (replace_table, r"data/runs\.parquet \(changed\)"),
        (lambda folder: (folder / "SHA256SUMS").unlink(), r"README\.md, data/runs\.parquet, .* and \d+ more"),
    ],
)
def test_a_foreign_file_stops_a_publication(
    made: Path, published: Path, change: Callable[[Path], object], named: str
) -> None:
    change(published)
    before = read_tree(published)
    with pytest.raises(ConfigError, match=rf"^out=\S+: holds other files .*: {named}; move them, or name"):
        prepare_dataset(read_published([made]), published)
    assert read_tree(published) == before
    assert [path.name for path in published.parent.iterdir()] == ["set"]


def test_a_file_that_comes_while_a_publication_is_made_stays(made: Path, published: Path) -> None:
    def make_page() -> str:
        add_thesis(published)
        return ""

    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        prepare_dataset(read_published([made]), published, make_page=make_page)
    assert (published / "thesis.tex").read_text() == "three years"
    assert (published / "data/runs.parquet").is_file()


@pytest.mark.parametrize("where", ["earlier", "both", "new"])
def test_what_a_killed_publication_left_is_removed(made: Path, published: Path, where: str) -> None:
    new, earlier = (published.with_name(f".set.kvbench-{part}") for part in ("new", "earlier"))
    if where != "earlier":
        (new / "data").mkdir(parents=True)
    if where == "both":
        shutil.copytree(published, earlier)
    elif where == "earlier":  # killed when the earlier one was set aside
        published.rename(earlier)
        add_thesis(earlier)
        with pytest.raises(ConfigError, match=r"holds other files .*: thesis\.tex"):
            prepare_dataset(read_published([made]), published)
        (published / "thesis.tex").unlink()
    prepare_dataset(read_published([made]), published)
    assert [path.name for path in published.parent.iterdir()] == ["set"]


@pytest.mark.parametrize("name", ["notes.txt", "provenance.json", "images/000009.png", "source", "metrics/a"])
@pytest.mark.parametrize("of_reference", [False, True])
def test_a_link_out_of_a_run_is_not_published(
    run: Path, tmp_path: Path, name: str, *, of_reference: bool
) -> None:
    folder = run.parent / str(results_of(run).reference) if of_reference else run
    (tmp_path / "secret").write_text("password")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path if name == "source" else tmp_path / "secret")
    with pytest.raises(ConfigError, match=rf"{name} is a symbolic link that leaves the run's folder"):
        read_published([run])


def test_links_of_loggers_and_inside_a_run_are_no_links_of_the_dataset(run: Path, tmp_path: Path) -> None:
    """W&B makes a link to its log in the user's cache. A damaged run in the same folder changes nothing."""
    (run / "wandb/run-1/logs").mkdir(parents=True)
    (run / "wandb/run-1/logs/debug-core.log").symlink_to(tmp_path / "cache/core.log")
    (run / "config.yaml").rename(run / "settings.yaml")
    (run / "config.yaml").symlink_to("settings.yaml")
    (run / "images/000001.png").rename(run / "one.png")
    (run / "images/000001.png").symlink_to("../one.png")
    shutil.copytree(run, run.with_name("broken-0.1"), symlinks=True)
    (run.with_name("broken-0.1") / "results.json").write_text("{")
    out = tmp_path / "set"
    prepare_dataset(read_published([run]), out)
    assert not [path for path in out.rglob("*") if path.is_symlink() or "wandb" in str(path.relative_to(out))]
    out.rename(tmp_path / "target")
    out.symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="set: is a symbolic link; name its target folder"):
        prepare_dataset(read_published([run]), out)
    (run / "metrics/wandb").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"metrics/wandb is a symbolic link that leaves the run's folder"):
        read_published([run])
    (run / "metrics/wandb").unlink()
    reference = run.parent / str(results_of(run).reference)
    reference.rename(tmp_path / reference.name)
    reference.symlink_to(tmp_path / reference.name)
    with pytest.raises(ConfigError, match=r"the reference of .* is a symbolic link"):
        read_published([run])


def test_texts_of_a_record_stay_texts_in_the_card(run: Path, tmp_path: Path) -> None:
    hostile = "h2o\n\n# Owned\n<script>alert(1)</script> ![x](http://e/x.png) `a` | b \\"
    values = json.loads((run / "results.json").read_text())
    values["method"] = hostile
    values["config"]["prompts"] = {"path": f"{hostile}.txt"}
    values["provenance"] |= {"cpu": hostile, "device": hostile, "code": {"commit": hostile}}
    (run / "results.json").write_text(json.dumps(values))
    prepare_dataset(
        read_published([run]), tmp_path / "set", licence=f"mit\nx: {hostile}", author='Ada: "<b>", #1 |'
    )
    card = hub.DatasetCard.load(tmp_path / "set" / "README.md")
    assert card.data.license == f"mit\nx: {hostile}"
    assert set(card.data.to_dict()) == {"license", "pretty_name", "tags", "configs", "author"}
    assert card.data.to_dict()["author"] == 'Ada: "<b>", #1 |'
    assert "Published by Ada: " in card.text
    assert "Owned" in card.text
    assert "<" not in re.sub(r"`[^`]*`", "", card.text)
    assert "](http" not in card.text
    assert not [line for line in card.text.splitlines() if re.match(r"\W*#\W*Owned", line)]
    [head, _, *rows] = [line for line in card.text.split("## How")[0].splitlines() if line.startswith("|")]
    cells = {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in (head, *rows)}
    assert len(cells) == 1


def test_images_that_are_not_the_recorded_ones_are_not_published(run: Path, tmp_path: Path) -> None:
    (run / "images" / "000002.png").write_bytes((run / "images" / "000001.png").read_bytes())
    with pytest.raises(SampleSetError, match=r"000002\.png is not the recorded file"):
        prepare_dataset(read_published([run]), tmp_path / "set")
    assert not list(tmp_path.glob("*set*"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: (run / "results.json").unlink(), "is not a finished run: it has no results.json"),
        (
            lambda run: shutil.rmtree(next(run.parent.glob("full-*"))),
            r"the reference of .*streaming_llm-.*, .*full-.*, is not a finished run",
        ),
        (lambda run: (run / "results.json").write_text("{"), r"streaming_llm-\S+/results\.json: cannot be read"),
    ],
)  # fmt: skip
def test_only_finished_runs_are_published(run: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(run)
    with pytest.raises(ConfigError, match=message):
        read_published([run])


def test_a_run_is_published_once_under_a_name_of_its_own(made: Path, run: Path) -> None:
    runs = read_published([made, made])
    assert len(runs) == 2  # with the reference
    with pytest.raises(ConfigError, match="are one run; name one of them"):
        read_published([made, run])
    assert choose_name(runs) == choose_name(runs[::-1])
    assert choose_name(runs[:1]) == f"fake-{made.name}"


def test_readings_are_published_without_hidden_states(tmp_path: Path) -> None:
    full, method = write_reading_runs(tmp_path / "runs", {"h2o": ((0.5,) * 8,) * 2})
    folders = [tmp_path / "runs" / run.model / run.run for run in (full, method)]
    prepare_dataset(read_published([folders[1]]), tmp_path / "set", "apache-2.0")
    for folder in folders:
        for stored in (folder / "readings").iterdir():
            published = tmp_path / "set/readings" / folder.parent.name / folder.name / stored.name
            ours, theirs = ScoredText.read(published), ScoredText.read(stored)
            assert ours.words == theirs.words
            assert ours.kl.tolist() == theirs.kl.tolist()
            assert b'"states"' not in published.read_bytes()
    assert b'"states"' in (folders[0] / "readings" / "000000.safetensors").read_bytes()
    card = (tmp_path / "set" / "README.md").read_text()
    assert "Hidden states of the full cache" in card
    assert "config_name: images" not in card
    samples = pl.read_parquet(tmp_path / "set" / "data" / "samples.parquet")
    assert all((tmp_path / "set" / file).is_file() for file in samples["file"])


def test_a_full_disk_is_an_error_of_the_system(made: Path, tmp_path: Path) -> None:
    """The kernel refuses to write more than 100 bytes of a file, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*runs\.parquet'"):
            prepare_dataset(read_published([made]), tmp_path / "set")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_datasets_loads_every_configuration(
    run: Path, tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader that the Hub's viewer uses finds images, samples and runs, one configuration after the other."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: it is in the extra dev")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", value=True)
    prepare_dataset(read_published([run]), tmp_path / "set")
    loaded = {
        name: datasets.load_dataset(str(tmp_path / "set"), name, split="train", cache_dir=str(tmp_path))
        for name in ("runs", "samples", "images")
    }
    counts = {name: rows.num_rows for name, rows in loaded.items()}
    assert counts == {"runs": 2, "samples": 2 * COUNT, "images": 2 * COUNT}
    psnr = [json.loads(line)["psnr"] for line in (run / "metrics/psnr-uint8.samples.jsonl").open()]
    ours = loaded["images"].filter(lambda row: row["method"] != "full")
    assert [row["psnr"] for row in ours] == psnr
    for index, row in enumerate(ours):
        for column, folder in (("image", run), ("reference", next(run.parent.glob("full-*")))):
            with Image.open(folder / f"images/{index:06d}.png") as image:
                assert row[column].tobytes() == image.tobytes()
