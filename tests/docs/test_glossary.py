"""The glossary: enough terms, in order, one sentence each, and links to terms that exist."""

import re

import pytest

from tests.support.pages import list_pages
from tests.support.places import ROOT

TERMS = dict(re.findall(r"^## (.+)\n\n(.+)$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE))
PAGES = ("budget", "methods", "runs", "start", "storage", "sweeps")
LINKED = ("README.md", *(f"docs/{page}.md" for page in PAGES))


def test_terms_are_sorted_and_have_one_sentence_each() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert headings == list(TERMS)
    assert len(TERMS) >= 40
    assert headings == sorted(headings, key=str.lower)
    assert [term for term, text in TERMS.items() if not re.fullmatch(r"[A-Z].*\.", text)] == []
    assert [term for term, text in TERMS.items() if re.search(r"[.!?]\s", text)] == []


@pytest.mark.parametrize("page", list_pages())
def test_links_lead_to_terms(page: str) -> None:
    text = (ROOT / page).read_text()
    anchors = {term.lower().replace(" ", "-") for term in TERMS}
    linked = re.findall(r"\]\((?:docs/)?glossary\.md#([\w-]+)\)", text)
    linked += re.findall(r"\]\(#([\w-]+)\)", text) if page == "docs/glossary.md" else []
    assert [anchor for anchor in linked if anchor not in anchors] == []
    assert linked or page not in LINKED
