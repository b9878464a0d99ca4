"""Datasets of others: what is read, what is left out with a line, and which verification belongs to which files."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from kvbench.core.config import ConfigError
from kvbench.core.files import hash_path
from kvbench.leaderboard.datasets import find_datasets, read_dataset
from kvbench.leaderboard.verifications import choose_checked, find_verifications
from kvbench.report.publication import write_file_list
from kvbench.verify.document import name_document, write_document
from kvbench.verify.run import Choice
from kvbench.verify.verdict import Finding, Verdict
from tests.support.datasets import publish_runs, read_leaderboard

AUTHOR = 'Ada: "<b>", #1'
HEAT, RANDOM = "infinity_tiny/heatkv-0.1-01", "infinity_tiny/random-0.1-01"


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets with one reference."""
    folder = tmp_path_factory.mktemp("published")
    (folder / "runs").mkdir()
    values = {"heatkv": (26.0, 24.0, 25.0, 29.0), "random": (20.0, 21.0, 19.0, 20.0)}
    for name, methods, author in (("ada", ("heatkv", "random"), AUTHOR), ("ben", ("heatkv",), None)):
        out = publish_runs(folder / "runs" / name, {method: values[method] for method in methods}, author)
        out.rename(folder / name)
    shutil.rmtree(folder / "runs")
    return folder


@pytest.fixture
def copies(sets: Path, tmp_path: Path) -> Path:
    """Copies that may be damaged."""
    shutil.copytree(sets, tmp_path / "published")
    return tmp_path / "published"


def list_rows(folder: Path) -> list[dict[str, Any]]:
    [metric] = read_leaderboard(find_datasets([f"{folder}/*"]), folder)["metrics"]
    [ranking] = metric["rankings"]
    return list(ranking["rows"])


def test_rows_say_who_when_which_version_and_card(sets: Path) -> None:
    heat, baseline = list_rows(sets)
    assert (heat["label"], heat["value"], heat["rows"]) == (
        "heatkv",
        "26.00 [25.00, 27.00]",
        "1 row",
    )
    assert [(copy["who"], copy["dataset"]) for copy in heat["copies"]] == [
        (AUTHOR, "ada"),
        ("not stated", "ben"),
    ]
    [copy] = baseline["copies"]
    assert {name: copy[name] for name in ("when", "version", "card", "status")} == {
        "when": "2026-05-04",
        "version": "0.1.0, c0ffee00",
        "card": "CPU: an EPYC",
        "status": "not verified",
    }
    assert str(baseline["difference"]).startswith("\N{MINUS SIGN}6.00 [")
    assert not baseline["level"]


def test_patterns_name_each_dataset_once(sets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sets.parent)
    found = find_datasets([f"{sets.name}/*", str(sets / "ada"), f"{sets.name}/a*"])
    assert [str(one.folder) for one in found.datasets] == [f"{sets.name}/ada", f"{sets.name}/ben"]
    assert found.left_out == ()


@pytest.mark.parametrize("pattern", ["nowhere/*", "nowhere", "ada/README.md", "a**", ""])
def test_a_pattern_that_names_no_folder_is_named(
    sets: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sets)
    if pattern == "":
        monkeypatch.chdir(sets / "ada" / "data")
        assert find_datasets([pattern]).left_out  # the current folder, which is no dataset
        return
    with pytest.raises(ConfigError, match=r"runs_dirs=.*: names no folder"):
        find_datasets([pattern])


def edit_results(folder: Path) -> str:
    path = folder / "runs" / HEAT / "results.json"
    path.write_text(path.read_text().replace("26.0", "36.0"))
    return r"not as in SHA256SUMS: runs/infinity_tiny/heatkv-0.1-01/results.json; copy"


def edit_and_list(folder: Path) -> str:
    path = folder / "runs" / HEAT / "results.json"
    path.write_text(path.read_text()[:100])
    write_file_list(folder)
    return r"results.json: cannot be read"


def lose_reference(folder: Path) -> str:
    shutil.rmtree(folder / "runs" / "infinity_tiny" / "full-1-0")
    write_file_list(folder)
    return "lacks full-1-0, the reference of infinity_tiny/heatkv-0.1-01"


def add_run(folder: Path) -> str:
    shutil.copytree(folder / "runs" / HEAT, folder / "runs" / "infinity_tiny" / "best")
    write_file_list(folder)
    return "best: results.json is of heatkv-0.1-01"


def link_outside(folder: Path) -> str:
    path = folder / "runs" / HEAT / "results.json"
    shutil.move(path, folder.parent / "results.json")
    path.symlink_to(folder.parent / "results.json")
    return "not as in SHA256SUMS"


def break_table(folder: Path) -> str:
    (folder / "data" / "samples.parquet").write_bytes(b"PAR1")
    write_file_list(folder)
    return "samples.parquet: cannot be read"


def repeat_rows(folder: Path) -> str:
    path = folder / "data" / "samples.parquet"
    table = pl.read_parquet(path)
    pl.concat([table, table.head(1)]).write_parquet(path)
    write_file_list(folder)
    return f"samples.parquet: has {len(table) + 1} rows, the records give {len(table)} at most; copy"


def lose_list(folder: Path) -> str:
    (folder / "SHA256SUMS").unlink()
    return "is no published dataset"


def cut_samples(folder: Path) -> str:
    (folder / "runs" / HEAT / "samples.jsonl").write_text("{")
    write_file_list(folder)
    return "samples.jsonl, line 1"


def write_metadata(value: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / "README.md").write_text(f"---\nauthor: {value}\n---\n")
        write_file_list(folder)
        return "README.md: its metadata cannot be read ("

    write.__name__ = value
    return write


def nest(folder: Path) -> str:
    path = folder / "runs" / HEAT / "results.json"
    values = json.loads(path.read_text())
    for _ in range(600):
        values["config"]["method"] = {"inner": values["config"]["method"]}
    path.write_text(json.dumps(values))
    write_file_list(folder)
    return "results.json has more than 64 levels"


def name_outside(folder: Path) -> str:
    (folder.parent / "secret").write_text("a")
    digest = hash_path(folder.parent / "secret")
    with (folder / "SHA256SUMS").open("a") as file:
        file.write(f"{digest}  runs/../../secret\n")
    return "not as in SHA256SUMS: runs/../../secret; copy"


def name_through_link(folder: Path) -> str:
    other = folder.parents[1] / "other"
    other.mkdir()
    (other / "secret").write_text("a")
    (folder / "data" / "link").symlink_to(other)
    with (folder / "SHA256SUMS").open("a") as file:
        file.write(f"{hash_path(folder / 'data' / 'link' / 'secret')}  data/link/secret\n")
    return "not as in SHA256SUMS: data/link, data/link/secret; copy"


def add_page(folder: Path) -> str:
    (folder / "dashboard.html").write_text("<script>")
    return "not as in SHA256SUMS: dashboard.html; copy"


def link_page(folder: Path) -> str:
    (folder.parent / "page.html").write_text("<script>")
    write_file_list(folder)
    (folder / "dashboard.html").symlink_to(folder.parent / "page.html")
    with (folder / "SHA256SUMS").open("a") as file:
        file.write(f"{hash_path(folder / 'dashboard.html')}  dashboard.html\n")
    return "not as in SHA256SUMS: dashboard.html; copy"


def name_in_latin(folder: Path) -> str:
    (folder / "data" / os.fsdecode(b"caf\xe9")).write_text("a")
    return r"not as in SHA256SUMS: data/caf\udce9; copy"


def name_with_escapes(folder: Path) -> str:
    (folder / "data" / "\x1b[2K\u202e").write_text("a")
    return "not as in SHA256SUMS: data/?[2K?; copy"


DAMAGES = [
    *map(write_metadata, ("!!bool maybe", "&a b\nc: *a", "!!int ''", "!!timestamp x", "{", "[" * 2000)),
    nest,
    name_outside,
    name_through_link,
    add_page,
    link_page,
    name_in_latin,
    name_with_escapes,
    edit_results,
    edit_and_list,
    lose_reference,
    add_run,
    link_outside,
    break_table,
    repeat_rows,
    lose_list,
    cut_samples,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_dataset_is_one_line_and_the_others_are_shown(
    copies: Path, damage: Callable[[Path], str]
) -> None:
    said = damage(copies / "ada")
    found = find_datasets([f"{copies}/*"])
    assert [one.folder.name for one in found.datasets] == ["ben"]
    [line] = found.left_out
    assert line.startswith(f"{copies}/ada")
    assert said in line
    assert "\n" not in line
    assert [row["label"] for row in list_rows(copies)] == ["heatkv"]


def write_outcome(folder: Path, *verdicts: Verdict, by: str | None = "Eve") -> Path:
    text = write_document(folder, Choice(3, 7), verdicts, {"machine": "an EPYC"}, by)
    path = name_document(folder)
    path.write_text(text)
    return path


def test_a_verification_counts_for_exactly_its_files(copies: Path) -> None:
    good = [Verdict(name, chosen=(0, 1, 2)) for name in ("dataset", HEAT, RANDOM)]
    path = write_outcome(copies / "ada", *good)
    heat, _ = list_rows(copies)
    first, second = heat["copies"]
    assert (first["status"], second["status"]) == ("verified", "not verified")
    assert first["status_text"].startswith("3 of 4 samples, by Eve, ")
    (copies / "again").mkdir()
    shutil.move(path, copies / "verification-renamed.json")
    assert find_verifications(read_dataset(copies / "ada"))
    card = copies / "ada" / "README.md"
    card.write_text(card.read_text() + "\nBest of all.\n")
    write_file_list(copies / "ada")
    assert find_verifications(read_dataset(copies / "ada")) == ()


def test_an_outcome_that_differs_counts_first(copies: Path) -> None:
    path = write_outcome(copies / "ada", Verdict("dataset"), Verdict(HEAT, chosen=(0,)), Verdict(RANDOM))
    path.rename(copies / "verification-first.json")
    bad = Verdict(HEAT, (Finding("sample 3", "differs"),), chosen=(3,))
    write_outcome(copies / "ada", Verdict("dataset"), bad, by=AUTHOR)
    known = find_verifications(read_dataset(copies / "ada"))
    assert len(known) == 2
    found = choose_checked(known, HEAT)
    assert found is not None
    assert (found[1].status, found[1].text) == ("differs", "sample 3: differs")
    [status_text] = [
        copy["status_text"]
        for row in list_rows(copies)
        for copy in row["copies"]
        if copy["status"] == "differs"
    ]
    assert ", the author, " in status_text


HOSTILE = ("\ud800", "a\u202eb", "x" * 1000, "", "a\tb\x00")


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_that_cannot_be_printed_are_not_stated(copies: Path, text: str) -> None:
    card = copies / "ada" / "README.md"
    card.write_text(f"---\nauthor: {json.dumps(text)}\n---\n")
    write_file_list(copies / "ada")
    bad = Verdict(HEAT, (Finding("sample 3", text),), chosen=(3,))
    path = write_outcome(copies / "ada", Verdict("dataset"), bad)
    values = json.loads(path.read_text())
    values.update(by=text, finished=text, verifier={"machine": text})
    path.write_text(json.dumps(values))
    found = find_datasets([f"{copies}/*"])
    assert found.left_out == ()
    texts = read_leaderboard(found, copies)
    json.dumps(texts, ensure_ascii=False).encode()
    assert not text or json.dumps(text)[1:-1] not in json.dumps(texts)
    ada = next(one for one in texts["datasets"] if one["name"] == "ada")
    assert ada["author"] == "not stated"
    assert ada["outcomes"] == ["0 of 1 runs verified verifier not stated, not stated, seed 7, not stated"]


def test_a_dataset_whose_tables_differ_has_no_verified_run(copies: Path) -> None:
    whole = Verdict("dataset", (Finding("README.md", "its table is not the table of the runs"),))
    write_outcome(copies / "ada", whole, Verdict(HEAT, chosen=(0,)), Verdict(RANDOM, chosen=(0,)))
    [known] = find_verifications(read_dataset(copies / "ada"))
    assert {one.status for one in known.runs.values()} == {"differs"}
    assert known.good == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.pop("runs"),
        lambda values: values["runs"][0].update(status="excellent"),
        lambda values: values.update(runs=[1]),
        lambda values: values.update(verifier=None),
        lambda values: values.update(seed="x"),
        lambda values: values.update(seed=float("inf")),
    ],
)
def test_damaged_outcomes_are_left_out(copies: Path, change: Callable[[dict[str, object]], object]) -> None:
    path = write_outcome(copies / "ada", Verdict(HEAT, chosen=(0,)))
    assert find_verifications(read_dataset(copies / "ada"))
    values = json.loads(path.read_text())
    assert values["files_sha256"] == hash_path(copies / "ada" / "SHA256SUMS")
    change(values)
    path.write_text(json.dumps(values))
    assert find_verifications(read_dataset(copies / "ada")) == ()
