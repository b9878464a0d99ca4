"""Texts that were read on the page: values of the document, the curve and the comparison in a browser."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.dashboard.document import make_document
from kvbench.dashboard.page import write_bundle, write_dashboard
from tests.support.run_folders import GIVEN, HOSTILE, TEXT, TEXTS, WORDS, write_reading_runs

SNAPKV = TEXTS["snapkv"]


@pytest.fixture
def read_dir(tmp_path: Path) -> Path:
    write_reading_runs(tmp_path, TEXTS)
    return tmp_path


def find_run(document: dict[str, Any], method: str) -> dict[str, Any]:
    [run] = [run for run in document["runs"] if run["method"] == method]
    return run


def test_the_document_holds_tokens_and_divergence(read_dir: Path) -> None:
    document = make_document(read_dir)
    shared, run = document["shared"], find_run(document, "snapkv")
    assert (run["samples"]["kind"], run["samples"]["index"]) == ("readings", [0, 1])
    for number, one in enumerate(run["samples"]["reading"]):
        assert shared[one["given"]] == f"{GIVEN}{number}"
        assert shared[one["words"]] == [WORDS[token] for token in TEXT]
        assert shared[one["full"]] == [WORDS[3 if i == 1 else token] for i, token in enumerate(TEXT)]
        assert np.frombuffer(base64.b64decode(one["kl"]), "<f4").tolist() == list(SNAPKV[number])
        assert one["others"] == {str(i): "#9" for i, kl in enumerate(SNAPKV[number]) if kl >= 1}
    assert run["drift"]["unit"] == "tokens"
    assert list(shared[run["drift"]["edges"]]) == list(range(9))
    assert [band[0] for band in run["drift"]["kl"]] == [sum(pair) / 2 for pair in zip(*SNAPKV, strict=True)]
    assert run["drift"]["tail"]["largest"] == 4
    assert find_run(document, "full")["drift"] is None
    assert document["metrics"]["kl"]["range"] is None  # JSON has no infinity
    own, other = (find_run(document, method)["samples"]["reading"] for method in ("h2o", "full"))
    assert [one["words"] for one in own] == [one["words"] for one in other]  # stored once


def test_a_damaged_text_does_not_stop_the_page(read_dir: Path) -> None:
    for content, path in zip(
        (b"", b"\x08\0\0\0\0\0\0\0{}"), read_dir.glob("*/snapkv-*/readings/*"), strict=True
    ):
        path.write_bytes(content)
    run = find_run(make_document(read_dir), "snapkv")
    assert run["samples"]["reading"] == [None, None]
    assert run["drift"] is None


@pytest.fixture
def address(read_dir: Path) -> str:
    return write_dashboard(read_dir).as_uri()


@pytest.mark.nightly
def test_the_curve_has_a_line_per_shown_method(page: Any) -> None:
    lines = page.locator("#courses [class^=mark][data-run]").evaluate_all(
        "all => all.map(one => one.dataset.run)"
    )
    assert len(set(lines)) == 2
    rows = page.locator("#tail tbody tr")
    assert [row.locator("td").all_inner_texts() for row in rows.all()] == [
        ["h2o", "10 %", "0.188", "0.250", "0.250", "0.250"],
        ["snapkv", "10 %", "0.000", "3.250", "3.850", "4.000"],
    ]
    page.select_option("#course", "same_top1")
    assert "same likeliest token" in page.locator("#courses svg").text_content()
    page.click('#methods [data-label="h2o"]')
    assert rows.count() == 1
    page.click('#methods [data-label="snapkv"]')
    assert page.locator("#drift").is_hidden()


@pytest.mark.nightly
def test_the_worst_tokens_are_compared_in_a_bundle(open_page: Callable[..., Any], read_dir: Path) -> None:
    page = open_page(write_bundle(read_dir).as_uri())
    page.keyboard.press("2")
    assert "2 of 2 samples" in page.locator("#left").inner_text()
    for side, method in (("#ours", "snapkv"), ("#theirs", "h2o")):
        options = page.locator(f"{side} option").all_inner_texts()
        page.select_option(side, label=next(one for one in options if method in one))
    page.select_option("#worst", "")
    assert page.locator(".texts h3").all_inner_texts() == ["h2o\n10 %", "snapkv\n10 %"]
    [first, *_] = page.locator(".places tbody tr").all()
    assert first.locator("td").all_inner_texts() == [
        "4", f"{GIVEN}0a hen anda", "3.000", "0.125", "a", "#9", "a",
    ]  # fmt: skip
    assert first.locator("mark").inner_text() == "a"
    assert page.locator(".places tbody tr").count() == 4  # those that diverge
    shades = page.locator(".texts > div:last-child .shaded span[title]")
    assert shades.count() == len(TEXT)
    assert HOSTILE in shades.nth(7).inner_text()
    assert "KL 3.000; full cache: a; method: #9" in shades.nth(3).get_attribute("title")
    first.locator("button").click()
    assert page.locator(".shaded .found").count() == 2
    page.select_option("#theirs", "budget")
    assert page.locator(".grid .shaded").count() == 3
