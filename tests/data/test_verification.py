"""Outcomes of verifications as files: which of them count, and what a damaged one does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.data.verification import (
    format_verification,
    list_verifications,
    name_verification,
    read_verdicts,
)

FILES = "5a" * 32
"""Hash of the files of the dataset."""


def describe(run: str, status: str, *texts: str) -> dict[str, object]:
    findings = [{"what": "sample 3", "text": text} for text in texts]
    return {"run": run, "status": status, "chosen": [1, 3], "findings": findings}


def write(folder: Path, name: str, *runs: dict[str, object], by: str | None = "Eve") -> Path:
    path = name_verification(folder / name)
    path.write_text(format_verification(folder / name, FILES, {"by": by}, runs))
    return path


def read(folder: Path) -> Any:
    return read_verdicts(list_verifications(folder / "set"), FILES)


def test_verdicts_are_of_the_files_that_were_verified(tmp_path: Path) -> None:
    write(tmp_path, "set", describe("m/a", "verified"), describe("m/b", "differs", "other bytes", "more"))
    known = read(tmp_path)
    assert (known["m/a"].status, known["m/a"].by, known["m/a"].chosen) == ("verified", "Eve", 2)
    assert known["m/b"].finding == "sample 3: other bytes"
    assert read_verdicts(list_verifications(tmp_path / "set"), "6b" * 32) == {}


def test_one_that_differs_counts_before_one_that_is_verified(tmp_path: Path) -> None:
    write(tmp_path, "a", describe("m/a", "verified"), describe("m/b", "not verifiable here", "no weights"))
    write(tmp_path, "b", describe("m/a", "differs", "x"), describe("m/b", "verified"))
    write(tmp_path, "c", describe("m/a", "verified"))
    assert {name: one.status for name, one in read(tmp_path).items()} == {"m/a": "differs", "m/b": "verified"}
    for whole in ("not verifiable here", "differs"):  # a run is no better than its dataset
        folder, runs = tmp_path / whole, (describe("m/a", "verified"), describe("m/b", "differs", "x"))
        folder.mkdir()
        write(folder, "set", describe("dataset", whole), *runs)
        found = {name: one.status for name, one in read(folder).items()}
        assert found == {"m/a": whole, "m/b": "differs"}


@pytest.mark.parametrize("text", ["\ud800", "a\u202eb", "x" * 1000, ""])
def test_texts_that_cannot_be_printed_are_left_out(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, "set", describe("m/a", "differs", text or "\x00"), by=text)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"finished": text}))
    one = read(tmp_path)["m/a"]
    assert (one.by, one.finding) == (None, "")
    assert one.finished in ("", "x" * 10)


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.pop("runs"),
        lambda values: values["runs"][0].update(status="excellent"),
        lambda values: values["runs"][0].update(chosen=3),
        lambda values: values.update(finished=3),
        lambda values: values.update(schema_version=1),
        lambda values: values.update(seed=float("inf")),
    ],
)
def test_damaged_outcomes_and_those_of_an_earlier_version_are_left_out(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    path = write(tmp_path, "set", describe("m/a", "verified"))
    values = json.loads(path.read_text())
    assert read(tmp_path)
    change(values)
    path.write_text(json.dumps(values))
    assert read(tmp_path) == {}
    path.write_text("[" * 100_000)
    assert read(tmp_path) == {}
