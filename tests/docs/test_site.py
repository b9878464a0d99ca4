"""The site: it builds without a warning, links have targets, and every method has its page."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.places import ROOT


class Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            if name in ("href", "src") and value:
                self.links.append(value)


@pytest.mark.slow
def test_the_site_is_whole(tmp_path: Path) -> None:
    """One test, since tests side by side would build the pages several times."""
    pytest.importorskip("furo")
    site = build(tmp_path)
    assert list_broken_links(site) == []
    check_method_pages(site / "generated" / "methods")


def build(folder: Path) -> Path:
    """Build the pages, which takes the warning of any as an error, and return their folder."""
    places = ["-d", str(folder / "trees"), "docs", str(folder / "html")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-qW", "--keep-going", *places],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "html"


def list_broken_links(site: Path) -> list[str]:
    """Return links to pages, files and anchors that are not there."""
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    missing = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link == "#":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = pages[target].anchors | {""} if target in pages else {parts.fragment}
            if not target.exists() or unquote(parts.fragment) not in known:
                missing.append(f"{path.relative_to(site)}: {link}")
    return missing


def check_method_pages(folder: Path) -> None:
    """Every method has a page, and the page every row of the results that is the method's."""
    pages = {path.stem: path.read_text().replace("\N{NO-BREAK SPACE}", " ") for path in folder.glob("*.html")}
    assert {path.stem for path in (ROOT / "conf" / "method").glob("*.yaml")} == set(pages)
    lines = [line for page in (ROOT / "docs/results").glob("*.md") for line in page.read_text().splitlines()]
    for name, text in pages.items():
        own = (f"| {name} |", f"| {name}, ")
        rows = [line.split("|") for line in lines if line.startswith(own)]
        assert all(cell.strip(" *") in text for row in rows for cell in row[2:])  # without the marks of bold
        assert ("Not measured" in text) == (not rows)
