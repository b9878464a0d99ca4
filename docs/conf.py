"""How Sphinx builds the documentation: `make docs` writes it to `build/docs/html`."""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]  # kvbench as it lies here, and what generates pages

from generator.pages import write_pages  # noqa: E402  # found by the path above

from kvbench import __version__  # noqa: E402

project = "kvbench"
author = copyright = "The kvbench developers"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["generated/*.md", "examples"]  # the former are parts of other pages
suppress_warnings = ["myst.header"]  # a section of its own begins where another page is included

myst_enable_extensions = ["attrs_block", "fieldlist"]
myst_heading_anchors = 3
default_role = "literal"  # docstrings put names between single backticks
autodoc_member_order = "bysource"
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"kvbench {release}"
html_static_path = ["static"]
html_css_files = ["kvbench.css"]
html_show_sphinx = False


def adapt(source: str) -> str:
    """Return the text of a page as the site shows it.

    What a block of commands needs or takes, which its page says in a comment, becomes a line, numbers of papers become
    links, intervals are not broken, and links to cards of models lead to their pages.
    """
    source = re.sub(r"<!-- (needs|takes): (.+) -->", r"{.needs}\n*\1: \2*\n", source)
    source = re.sub(r"arXiv:(\d{4}\.\d{5}(?:v\d)?)", r"[arXiv:\1](https://arxiv.org/abs/\1)", source)
    source = re.sub(r"(\[-?[\d.]+), (-?[\d.]+\])", "\\1,\N{NO-BREAK SPACE}\\2", source)
    return re.sub(r"\]\(\.\./kvbench/assets/(\w+)/README\.md\)", r"](generated/cards/\1.md)", source)


def adapt_page(_: Sphinx, __: str, source: list[str]) -> None:
    """Adapt a page before it is read."""
    source[0] = adapt(source[0])


def adapt_part(_: Sphinx, __: Path, ___: str, source: list[str]) -> None:
    """Adapt what a page includes before it is read."""
    source[0] = adapt(source[0])


def skip_member(_: Sphinx, __: str, ___: str, member: object, skip: bool, ____: object) -> bool:
    """Leave out fields of tuples, of which Python says no more than their number."""
    return skip or (getattr(member, "__doc__", None) or "").startswith("Alias for field number")


def setup(app: Sphinx) -> None:
    """Generate pages before any is read."""
    write_pages(ROOT, Path(app.srcdir) / "generated")
    app.connect("source-read", adapt_page)
    app.connect("include-read", adapt_part)
    app.connect("autodoc-skip-member", skip_member)
