"""What tests of the dashboard share: runs, their page, and a browser that looks at it."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbench.dashboard.page import write_dashboard
from tests.support.browser import record_events
from tests.support.run_folders import write_image_runs, write_text_runs, write_unfinished_runs

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every kind."""
    folder = tmp_path_factory.mktemp("runs")
    write_image_runs(folder)
    write_text_runs(folder)
    write_unfinished_runs(folder)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    api = pytest.importorskip(
        "playwright.sync_api", reason='Playwright is not installed: pip install "kvbench[dev]"'
    )
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=list(ARGUMENTS))
        yield started
        started.close()


@pytest.fixture(scope="module")
def address(runs_dir: Path) -> str:
    """Where the page is."""
    return write_dashboard(runs_dir).as_uri()


@pytest.fixture
def page(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, freshly opened; in the end nothing was complained about, and nothing was asked of any network."""
    options = getattr(request, "param", {"viewport": {"width": 1300, "height": 900}})
    context = browser.new_context(**options)
    opened = context.new_page()
    complaints, requests = record_events(opened)
    opened.goto(address)
    opened.wait_for_selector("#pareto svg")
    yield opened
    title = opened.title()
    context.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    assert title == "kvbench dashboard"
