"""Sphinx configuration; `make docs` writes the site to `build/docs/html`."""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, and the generator of its pages

from docs.generator.columns import mark_columns  # noqa: E402  # on the path above
from docs.generator.pages import write_pages  # noqa: E402
from kvbench import __version__  # noqa: E402

project = "kvbench"
author = copyright = "The kvbench developers"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["examples"]
suppress_warnings = ["myst.header"]  # a section of its own begins where another page is included

myst_enable_extensions = ["attrs_block", "attrs_inline", "fieldlist"]
myst_heading_anchors = 3
default_role = "literal"  # docstrings put names between single backticks
autodoc_member_order = "bysource"
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"kvbench {release}"
html_static_path = ["static"]
html_css_files = ["kvbench.css"]
html_show_sphinx = False


DIFFERENCES = re.compile(
    r"(<!-- made by `make docs` from \S+_less_\S+ -->\n\n)(.*?)(\n\n<!-- end -->)", re.DOTALL
)
"""Table of paired differences in a page of results."""
FIGURE = re.compile(r"(!\[[^\]]*\]\()([\w./-]*images/\w+)\.svg\)")
"""Figure that a program of this repository draws twice, for light and for dark pages."""


def fold(table: re.Match[str]) -> str:
    """Return a table that opens when its summary, the number of rows, is clicked."""
    mark, rows, end = table.groups()
    count = len(rows.splitlines()) - 2  # without names of columns and the line below them
    return f"{mark}<details><summary>{count} rows</summary>\n\n{rows}\n\n</details>{end}"


def adapt(source: str) -> str:
    """Return the text of a page as the site shows it.

    Marks above blocks of commands become lines, arXiv numbers become links, and intervals get no line break. Links to
    methods and model cards, which on GitHub lead to files, lead to their pages. Paired differences fold, and a figure
    that has a dark twin, `<name>-dark.svg` beside `<name>.svg`, shows the one of the page's colours.
    """
    source = DIFFERENCES.sub(fold, source)
    source = FIGURE.sub(r"\1\2.svg){.only-light}\1\2-dark.svg){.only-dark}", source)
    source = re.sub(r"<!-- (needs|takes|at): (.+) -->", r"{.needs}\n*\1: \2*\n", source)
    source = re.sub(r"arXiv:(\d{4}\.\d{5}(?:v\d)?)", r"[arXiv:\1](https://arxiv.org/abs/\1)", source)
    source = re.sub(r"(\[-?[\d.]+), (-?[\d.]+\])", "\\1,\N{NO-BREAK SPACE}\\2", source)
    source = re.sub(r"\]\(\.\./conf/method/(\w+)\.yaml\)", r"](generated/methods/\1.md)", source)
    source = source.replace("](../README.md", "](generated/readme.md")
    return re.sub(r"\]\((?:\.\./)+kvbench/assets/(\w+)/README\.md\)", r"](/generated/cards/\1.md)", source)


def adapt_page(_: Sphinx, __: str, source: list[str]) -> None:
    """Adapt a page before it is read."""
    source[0] = adapt(source[0])


def skip_member(_: Sphinx, __: str, ___: str, member: object, skip: bool, ____: object) -> bool:
    """Leave out tuple fields that have no docstring of their own."""
    return skip or (getattr(member, "__doc__", None) or "").startswith("Alias for field number")


def setup(app: Sphinx) -> None:
    """Generate pages before any is read."""
    write_pages(ROOT, Path(app.srcdir) / "generated")
    app.connect("source-read", adapt_page)
    app.connect("doctree-read", mark_columns)
    app.connect("autodoc-skip-member", skip_member)
