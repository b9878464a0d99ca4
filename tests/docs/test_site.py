"""The documentation builds without a warning, its links lead somewhere, every choice of `conf/` stands on a page."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.places import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages."""
    pytest.importorskip("furo")
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-qW", "--keep-going", "-d", str(out / "trees"), "docs", str(out / "html")],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out / "html"


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


def test_internal_links_lead_somewhere(site: Path) -> None:
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
    assert missing == []


@pytest.mark.parametrize(
    ("group", "page", "shown"),
    [
        ("method", "methods.html", ">{}<"),
        ("model", "models.html", "<h3>{}<"),
        ("prompts", "prompts.html", "<h3>prompts={}<"),
        ("eval", "metrics.html", "<h3>eval={}<"),
        ("sweeps", "tables.html", "<h3>sweeps={}<"),
    ],
)
def test_every_choice_stands_on_a_page(site: Path, group: str, page: str, shown: str) -> None:
    text = (site / page).read_text()
    names = [path.stem for path in (ROOT / "conf" / group).glob("*.yaml")]
    assert names
    assert [name for name in names if shown.format(name) not in text] == []


def test_a_method_has_a_page_with_its_measured_rows(site: Path) -> None:
    paths = (site / "generated" / "methods").glob("*.html")
    pages = {path.stem: path.read_text().replace("\N{NO-BREAK SPACE}", " ") for path in paths}
    assert {path.stem for path in (ROOT / "conf" / "method").glob("*.yaml")} == set(pages)
    results = (ROOT / "docs" / "results.md").read_text()
    for name, text in pages.items():
        rows = [
            line.split("|")
            for line in results.splitlines()
            if line.startswith((f"| {name} |", f"| {name}, "))
        ]
        assert all(cell.strip() in text for row in rows for cell in row[2:])
        assert ("Not measured" in text) == (not rows)
