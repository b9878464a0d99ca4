"""The site: it builds without a warning, links have targets, and every method has its page."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.places import ROOT


@pytest.mark.slow
def test_the_site_is_whole(tmp_path: Path) -> None:
    """One test, since tests side by side would build the pages several times; a warning of any page is an error."""
    pytest.importorskip("furo")
    site = tmp_path / "html"
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-qW", "--keep-going", "-d", str(tmp_path / "trees"), "docs", str(site)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list_broken_links(site) == []
    check_method_pages(site / "generated" / "methods")


def list_broken_links(site: Path) -> list[str]:
    """Return links to pages, files and anchors that are not there."""
    texts = {path: path.read_text() for path in site.rglob("*.html")}
    anchors = {path: {"", *re.findall(r'\bid="([^"]+)"', text)} for path, text in texts.items()}
    missing = []
    for path, text in texts.items():
        for link in map(html.unescape, re.findall(r'\b(?:href|src)="([^"]+)"', text)):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link == "#":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists() or unquote(parts.fragment) not in anchors.get(target, {parts.fragment}):
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
