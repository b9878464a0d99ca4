"""Fixtures of the dashboard: runs, their page, a browser, and the scripts of the page in Node.js."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbench.dashboard.page import write_dashboard
from tests.support.places import ROOT
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


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a file; in the end nothing was complained about, and nothing was asked of any network."""
    contexts, complaints, requests = [], [], []

    def open_file(address: str) -> Any:
        context = browser.new_context(viewport={"width": 1300, "height": 900})
        contexts.append(context)
        opened = context.new_page()
        opened.on("console", lambda message: complaints.append(message.text))
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.on("request", lambda made: requests.append(made.url))
        opened.goto(address)
        return opened

    yield open_file
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []


@pytest.fixture(scope="module")
def address(runs_dir: Path) -> str:
    """Where the page is."""
    return write_dashboard(runs_dir).as_uri()


@pytest.fixture
def page(open_page: Callable[..., Any], address: str) -> Iterator[Any]:
    """The page, freshly opened."""
    opened = open_page(address)
    opened.wait_for_selector("#pareto svg")
    yield opened
    assert opened.title() == "kvbench dashboard"


@pytest.fixture
def run_script() -> Callable[..., str]:
    """Runs a program in Node.js after scripts of the page, whose document has these values, and returns its output."""
    if shutil.which("node") is None:
        pytest.skip("Node.js is not installed")

    def run(program: str, *scripts: str, **document: object) -> str:
        folder = ROOT / "kvbench" / "dashboard"
        own = [(folder / "scripts" / f"{name}.js").read_text() for name in scripts]
        head = f"const DOC = {json.dumps(document)}, d3 = require({str(folder / 'vendor/d3.min.js')!r});"
        words = ["node", "-e", "\n".join([head, *own, program])]
        return subprocess.run(words, capture_output=True, check=True, text=True).stdout

    return run
