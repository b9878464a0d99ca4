"""Published datasets on the page: which runs are shown, how they were verified, and what is left out with a line."""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from PIL import Image

from kvbench.core.config import ConfigError
from kvbench.dashboard.datasets import AddedRun, LoadedDatasets, find_datasets
from kvbench.dashboard.document import make_document
from kvbench.dashboard.page import render_bundle, write_dashboard
from kvbench.data.publication import write_file_list
from kvbench.data.verification import name_verification
from kvbench.extras.share.verify.verdict import Choice, Finding, Verdict, write_document
from kvbench.runs.record.results import read_results
from tests.support.run_folders import publish_runs, write_image_runs, write_text_runs

NAMES = ("infinity_tiny/full-1-0", "infinity_tiny/heatkv-0.1-01", "infinity_tiny/random-0.1-01")
HEAT = NAMES[1]
HEAT_FILE = f"runs/{HEAT}/results.json"
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">"
"""A finding that would run a program if it became HTML."""


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets of two people."""
    folder = tmp_path_factory.mktemp("published")
    values = {"heatkv": (26.0, 24.0, 25.0, 29.0), "random": (20.0, 21.0, 19.0, 20.0)}
    for name, methods in (("ada", ("heatkv", "random")), ("ben", ("heatkv",))):
        publish_runs(folder / "runs" / name, {one: values[one] for one in methods}).rename(folder / name)
    shutil.rmtree(folder / "runs")
    return folder


@pytest.fixture
def copies(sets: Path, tmp_path: Path) -> Path:
    """Copies that may be damaged."""
    return Path(shutil.copytree(sets, tmp_path / "published"))


def read_verdicts(folder: Path) -> dict[str, Any]:
    """The verdict on the run of heatkv in each dataset of a folder."""
    runs = make_document(folder, added=find_datasets([f"{folder}/*"]))["runs"]
    return {run["dataset"]: run["verified"] for run in runs if run["method"] == "heatkv"}


def change_pixel(dataset: Path, row: int = 0) -> None:
    """Change a pixel of an image; the list of files stays."""
    path = dataset / "images" / HEAT / "000001.png"
    pixels = np.asarray(Image.open(path)).copy()
    pixels[row, 0] ^= 255
    path.unlink()  # a copy may be a hard link
    Image.fromarray(pixels).save(path)


def verify(dataset: Path, *findings: Finding) -> None:
    """Write the outcome of a verification: everything as recorded, but for findings on the dataset's files."""
    good = [Verdict(name, chosen=(0, 1, 2)) for name in NAMES]
    outcome = write_document(dataset, Choice(3, 7), [Verdict("dataset", findings), *good], {}, "Eve")
    name_verification(dataset).write_text(outcome)


def test_runs_of_datasets_follow_the_own_ones_with_samples_and_values(sets: Path, tmp_path: Path) -> None:
    own = write_image_runs(tmp_path / "runs")
    document = make_document(tmp_path / "runs", added=find_datasets([f"{sets}/*"]))
    assert len(document["runs"]) == len(own) + 5
    assert not any("dataset" in run for run in document["runs"][: len(own)])
    full, heat, _, other_full, other_heat = document["runs"][len(own) :]
    assert (heat["dataset"], heat["method"], heat["verified"]) == ("ada", "heatkv", None)
    assert heat["samples"]["values"]["psnr"] == [26.0, 24.0, 25.0, 29.0]
    assert heat["samples"]["columns"].keys() == {"psnr"}
    assert (tmp_path / "runs" / heat["folder"] / "results.json").is_file()
    assert (tmp_path / "runs" / heat["samples"]["folder"] / "000003.png").is_file()
    assert [document["runs"][one["reference"]] for one in (heat, other_heat)] == [full, other_full]
    assert len({one["conditions"] for one in (heat, other_heat, full, other_full)}) == 2
    page = render_bundle(tmp_path / "none", added=find_datasets([f"{sets}/ada"]))
    document = json.loads(page.split('id="document">')[1].split("</script>")[0])
    assert [len(run["samples"]["picture"]) for run in document["runs"]] == [4, 4, 4]
    assert len(document["bundle"]["pictures"]) == 12


def test_a_mean_over_seeds_is_of_own_runs(tmp_path: Path) -> None:
    published = publish_runs(tmp_path / "set", {"heatkv": (26.0, 24.0, 25.0, 29.0)}, seeds=(0, 1))
    runs_dir = tmp_path / "set-runs"
    alone = make_document(runs_dir)
    assert len(alone["means"]) == 2
    means = make_document(runs_dir, added=find_datasets([str(published)]))["means"]
    assert [one["runs"] for one in means] == [one["runs"] for one in alone["means"]]


def test_texts_of_a_dataset_are_in_the_page(tmp_path: Path) -> None:
    write_text_runs(tmp_path / "runs")
    folder = tmp_path / "runs/reasoner_tiny/rkv-0.25"
    shutil.move(folder / "texts", tmp_path / "texts")  # where a dataset has them
    results, rows = read_results(folder), {0: {"exact_answer": 0.0}, 1: {"exact_answer": 1.0}}
    assert results is not None
    entry = AddedRun(results, "set", "texts", tmp_path / "texts", rows, None)
    document = make_document(tmp_path / "none", added=LoadedDatasets({folder: entry}))
    samples, shared = document["runs"][0]["samples"], document["shared"]
    assert samples["values"] == {"exact_answer": [0.0, 1.0]}
    assert shared[samples["text"][0]].endswith("answer: 8")
    assert [shared[number] for number in samples["answer"]] == ["7", "2"]


def test_a_verification_of_a_damaged_copy_says_nothing_of_the_honest_dataset(copies: Path) -> None:
    shutil.copytree(copies / "ada", copies / "copy")
    change_pixel(copies / "copy")
    assert (copies / "ada/SHA256SUMS").read_bytes() == (copies / "copy/SHA256SUMS").read_bytes()
    verify(copies / "copy", Finding("SHA256SUMS", "has another images/x (changed)"))
    assert read_verdicts(copies)["ada"] is None
    verify(copies / "ada")
    known = read_verdicts(copies)
    assert (known["copy"]["status"], known["ben"]) == ("differs", None)
    told = {"status": "verified", "by": "Eve", "chosen": 3, "finding": ""}
    assert known["ada"].items() >= told.items()
    change_pixel(copies / "ada", row=1)
    assert read_verdicts(copies)["ada"] is None


def test_patterns_name_each_dataset_once(sets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sets)
    added = find_datasets(["*", str(sets / "ada"), "a*"])
    assert len(added.entries) == 5
    assert not any(folder.is_absolute() for folder in added.entries)
    assert added.left_out == ()
    for pattern in ("nowhere/*", "nowhere", "ada/README.md", "a**"):
        with pytest.raises(ConfigError, match=r"runs_dirs=.*: names no folder"):
            find_datasets([pattern])


CHANGED = {
    f"not as in SHA256SUMS: {HEAT_FILE}; copy": f"sed -i s/26.0/36.0/ {HEAT_FILE}",
    "is not a published dataset": "rm SHA256SUMS",
    "not as in SHA256SUMS: runs/../../secret; copy": (
        "echo a > ../secret; sha256sum ../secret | sed s,../secret,runs/../../secret, >> SHA256SUMS"
    ),
    "heatkv-0.1-01/results.json is a link that leaves the folder": (
        f"mv {HEAT_FILE} ../results.json; ln -s $PWD/../results.json {HEAT_FILE}"
    ),
    "data/link is a link that leaves the folder": "ln -s ../.. data/link",
    r"not as in SHA256SUMS: data/?[2K?, data/caf\udce9; copy": (
        r"touch $(printf 'data/caf\351') $(printf 'data/\033[2K\342\200\256')"
    ),
}
"""Verdicts on a dataset by the shell command that damages it."""
LISTED = {
    "results.json: cannot be read": f"printf '{{' > {HEAT_FILE}",
    "lacks full-1-0, the reference of infinity_tiny/heatkv-0.1-01": "rm -r runs/infinity_tiny/full-1-0",
    "best: results.json names heatkv-0.1-01": f"cp -r runs/{HEAT} runs/infinity_tiny/best",
    "samples.parquet: cannot be read": "printf PAR1 > data/samples.parquet",
    "samples.jsonl: damaged (line 1": f"echo {{}} > runs/{HEAT}/samples.jsonl",
}
"""The same after its files were listed again."""


def repeat_rows(folder: Path) -> str:
    path = folder / "data" / "samples.parquet"
    table = pl.read_parquet(path)
    pl.concat([table, table.head(1)]).write_parquet(path)
    return f"samples.parquet: has {len(table) + 1} rows, the records give {len(table)} at most; copy"


def nest(folder: Path) -> str:
    path = folder / HEAT_FILE
    values = json.loads(path.read_text())
    for _ in range(600):
        values["config"]["method"] = {"inner": values["config"]["method"]}
    path.write_text(json.dumps(values))
    return "results.json has more than 64 levels"


@pytest.mark.parametrize("damage", [*CHANGED, *LISTED, repeat_rows, nest])
def test_a_damaged_dataset_is_one_line_and_the_others_are_shown(
    copies: Path, damage: str | Callable[[Path], str]
) -> None:
    if isinstance(damage, str):
        command, said = {**CHANGED, **LISTED}[damage], damage
        subprocess.run(["bash", "-ec", command], cwd=copies / "ada", check=True)
    else:
        said = damage(copies / "ada")
    if damage not in CHANGED:
        write_file_list(copies / "ada")
    added = find_datasets([f"{copies}/*"])
    assert {entry.dataset for entry in added.entries.values()} == {"ben"}
    [line] = added.left_out
    assert line.folder == f"{copies}/ada"
    assert said in line.reason
    assert "\n" not in line.reason
    assert asdict(line) in make_document(copies, added=added)["damaged"]


@pytest.fixture
def address(copies: Path) -> str:
    """The page of a verified dataset and of a copy of it with another pixel, without runs of its own."""
    path = copies / "ada" / HEAT_FILE
    path.write_text(path.read_text().replace('"psnr"', '"constructor"'))  # a name that every object knows
    write_file_list(copies / "ada")
    shutil.copytree(copies / "ada", copies / "copy & co")
    change_pixel(copies / "copy & co")
    verify(copies / "ada")
    verify(copies / "copy & co", Finding("SHA256SUMS", HOSTILE))
    added = find_datasets([f"{copies}/ada", f"{copies}/copy*"])
    return write_dashboard(copies / "none", copies, added=added).as_uri()


@pytest.mark.nightly
def test_the_page_marks_verified_runs_and_shows_their_images(page: Any) -> None:
    heads = page.locator("#runs thead th").all_inner_texts()
    places = [heads.index(name) for name in ("method", "dataset", "verified")]
    cells = [row.locator("td").all_inner_texts() for row in page.locator("#runs tbody tr").all()]
    assert sorted([row[place].strip() for place in places] for row in cells) == [
        [method, *told]
        for method in ("full", "heatkv", "random")
        for told in (("ada", "verified"), ("copy & co", "differs"))
    ]
    assert page.locator("#runs .bad").first.get_attribute("title").endswith(HOSTILE)
    page.click("[data-view=comparison]")
    page.wait_for_function("[...document.images].some((image) => image.naturalWidth)")
    assert page.evaluate("[...document.images].every((image) => !image.complete || image.naturalWidth)")
