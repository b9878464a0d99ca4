"""The view of published datasets: its rankings in a browser, on wide and narrow pages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbench.dashboard.page import write_bundle, write_dashboard
from kvbench.leaderboard.datasets import find_datasets
from kvbench.leaderboard.document import make_leaderboard
from kvbench.report.publication import write_file_list
from tests.support.browser import record_events
from tests.support.datasets import publish_runs
from tests.support.run_folders import write_image_runs

VALUES = {"heatkv": (26.0, 24.0, 25.0, 29.0), "random": (20.0, 21.0, 19.0, 20.0)}
HOSTILE = """</script><img src=x onerror="document.title='owned'">"""
"""Author of a dataset, whose name would run a program if it became HTML."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets of two people whose references differ; one's name would run a program if it became HTML."""
    folder = tmp_path_factory.mktemp("published")
    for name, author, brightness in (("ada & co", HOSTILE, 200), ("ben", "Ben", 100)):
        publish_runs(folder / "runs" / name, VALUES, author, brightness)
        (folder / "runs" / name).rename(folder / name)
        (folder / name / "dashboard.html").write_text("the dataset's own page")
        write_file_list(folder / name)
    return folder


def make_texts(published: Path, output: Path | None) -> dict[str, object]:
    return make_leaderboard(find_datasets([f"{published}/[ab]*"]), output)


def test_a_page_without_datasets_has_no_such_view(tmp_path: Path) -> None:
    write_image_runs(tmp_path)
    assert 'id="rankings"' not in write_dashboard(tmp_path).read_text()


def test_a_page_has_datasets_without_runs(published: Path, tmp_path: Path) -> None:
    page = write_dashboard(tmp_path / "none", tmp_path, leaderboard=make_texts(published, tmp_path))
    text = page.read_text()
    assert text.count('class="card ranking"') == 2
    assert "these differ: samples of the reference." in text
    assert "<img src=x onerror" not in text
    assert 'ada%20%26%20co/dashboard.html"' in text
    assert "</a> <small>the author's page, with its own scripts</small>" in text
    page = write_bundle(tmp_path / "none", tmp_path, leaderboard=make_texts(published, None))
    assert "ada%20" not in page.read_text()


@pytest.fixture(params=[1400, 400])
def page(browser: Any, published: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, without runs of its own."""
    address = write_dashboard(tmp_path / "none", tmp_path, leaderboard=make_texts(published, tmp_path))
    context = browser.new_context(viewport={"width": request.param, "height": 900})
    opened = context.new_page()
    complaints, _ = record_events(opened)
    opened.goto(address.as_uri())
    yield opened
    title = opened.title()
    context.close()
    assert complaints == []
    assert title == "kvbench dashboard"


@pytest.mark.slow
def test_rankings_are_shown_by_metric_on_pages_of_any_width(page: Any, published: Path) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shown = page.locator("#rankings .ranking:visible")
    assert shown.count() == 2
    assert shown.first.locator("tbody tr:visible").count() == 2
    told = " ".join(shown.first.inner_text().split())
    for part in ("10 % of the full cache's tokens", "26.00 [25.00, 27.00]", "1 row", HOSTILE, "not verified"):
        assert part in told
    link = page.locator("#rankings a").first
    link.click()
    assert page.locator("body").inner_text() == "the dataset's own page"
    page.go_back()
    page.keyboard.press("1")
    assert page.locator("#rankings").is_hidden()
    page.keyboard.press("5")
    assert page.locator("#rankings").is_visible()
    assert page.evaluate("location.hash") == "#/rankings"
