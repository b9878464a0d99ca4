"""Claims of the pages: files and modules they name, numbers they repeat, versions."""

import contextlib
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kvbench.core.budget import Budget
from kvbench.core.segments import ModelSpec, next_scale
from kvbench.engine.schedule import predict_row_lengths, sum_tokens
from kvbench.methods.shared.base import Method
from tests.support.pages import list_pages, read_blocks
from tests.support.places import ROOT

SPEC = ModelSpec("small", 3, 2, 8, next_scale([(1, 1), (2, 2), (3, 3), (5, 5), (6, 6)]))
PAGES = (*list_pages(), "CHANGELOG.md")
PLACEHOLDERS = ("x", "<name>")
"""Placeholders for names of the reader's own files."""
ENTRY_POINTS = {"kvbench.plugins", "kvbench.samples"}
"""Groups of entry points."""
TERMS = dict(re.findall(r"^## (.+)\n\n(.+)$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE))
WRITTEN = {
    block.what for page in PAGES for block in read_blocks((ROOT / page).read_text()) if block.mark == "file"
}
"""Files that a page tells its reader to write."""


@pytest.mark.parametrize("page", PAGES)
def test_files_and_modules_that_a_page_names_exist(root: Path, page: str) -> None:
    text = (root / page).read_text()
    ignored = re.findall(r"^/?(\w+)/$", (root / ".gitignore").read_text(), re.MULTILINE)
    shipped = [path.name for path in root.iterdir() if path.is_dir() and path.name not in ignored]
    folders = "|".join(name for name in shipped if name[0] not in "._")
    named = {root / path for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", text)}
    linked = {(root / page).parent / path for path in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text)}
    made = {root / path for path in WRITTEN} | {root / "build" / "docs" / "html"}
    missing = [path for path in named | linked if not path.exists() and path.stem not in PLACEHOLDERS]
    assert [path for path in missing if path not in made] == []
    modules = set(re.findall(r"\bkvbench(?:\.[a-z_]+)+", text)) - ENTRY_POINTS
    own = {
        re.sub(r"^(?!kvbench/)", "kvbench/", path).removesuffix(".py").replace("/", ".") for path in WRITTEN
    }
    assert [module for module in modules - own if not locate(module)] == []
    anchors = {term.lower().replace(" ", "-") for term in TERMS}
    terms = re.findall(r"\]\((?:docs/)?glossary\.md#([\w-]+)\)", text)
    assert [term for term in terms if term not in anchors] == []


def locate(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    with contextlib.suppress(ModuleNotFoundError):
        if importlib.util.find_spec(name) is not None:
            return True
    module, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(module), attribute)


def test_the_first_method_of_the_page_on_extending_keeps_to_any_budget() -> None:
    files = {
        b.what: b.text for b in read_blocks((ROOT / "docs" / "extending.md").read_text()) if b.mark == "file"
    }
    code, config = files["kvbench/methods/newest.py"], yaml.safe_load(files["conf/method/newest.yaml"])
    assert all(len(text.splitlines()) < 50 for path, text in files.items() if "/method" in path)
    namespace: dict[str, object] = {"__name__": "kvbench.methods.newest"}
    exec(compile(code, "newest.py", "exec"), namespace)
    factory = namespace[config.pop("_target_").rsplit(".", 1)[1]]
    assert isinstance(factory, type)
    for budget in (0.05, 0.3, 1):
        method = factory(**{key: 1 if value == "${sinks}" else value for key, value in config.items()})
        assert isinstance(method, Method)
        capacity = Budget.parse(budget, SPEC)
        method.prepare(SPEC, capacity)
        lengths = predict_row_lengths(SPEC, method)
        assert lengths is not None
        held = sum_tokens(lengths)
        assert held.max() <= capacity.capacity
        assert held.max() > 0.5 * capacity.capacity


def test_figures_of_the_readme_are_on_the_pages_that_it_links() -> None:
    rows = re.findall(r"^\| \[.*\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) > 3
    for row in rows:
        [page, *others] = re.findall(r"\]\((docs/[\w./]+)#[\w-]+\)", row)
        assert {page} == {page, *others}
        lines = (ROOT / page).read_text().splitlines()
        pairs = list(pair_figures(row.rsplit("| ", 1)[1]))
        assert pairs
        for name, figure in pairs:
            both = rf"(?<![\w/]){name}(?![\w/]).*(?<![\d.]){figure}(?!\d)"
            assert any(re.search(both, line) for line in lines), (name, figure)


def pair_figures(cell: str) -> Iterator[tuple[str, str]]:
    """The methods of a cell with their figures: a figure belongs to the names before it."""
    names: list[str] = []
    ended = False
    for name, figure in re.findall(r"`([\w/]+)`|(\d+\.\d+)", cell):
        if figure:
            yield from ((one, figure) for one in names)
        else:
            names = [name] if ended else [*names, name]
        ended = bool(figure)


def test_terms_of_the_glossary_are_sorted_and_have_one_sentence_each() -> None:
    assert len(TERMS) >= 40
    assert list(TERMS) == sorted(TERMS, key=str.lower)
    assert [term for term, text in TERMS.items() if not re.fullmatch(r"[A-Z](?!.*[.!?]\s).*\.", text)] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900
