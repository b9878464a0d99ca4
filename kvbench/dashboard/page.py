"""The page: one HTML file with styles, scripts and data, which links the images of runs."""

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from kvbench.core.config import ConfigError
from kvbench.core.files import write_whole
from kvbench.dashboard.bundle import add_pictures
from kvbench.dashboard.datasets import NO_DATASETS, LoadedDatasets
from kvbench.dashboard.document import make_document
from kvbench.dashboard.vendor import VENDORED, Vendored

FILE, BUNDLE = "dashboard.html", "dashboard-bundle.html"
TEMPLATE = "dashboard.html.j2"
STYLES = ("theme", "frame", "tables", "views", "controls", "dialog", "readings")
"""Style sheets in styles/, in the order of inclusion."""
MAX_INTEGER = 2**53
"""Largest integer up to which JavaScript's numbers are exact."""
SCRIPTS = (
    "elements", "document", "address", "costs", "theme", "chosen", "tables", "pareto", "filters", "groups",
    "intervals", "crossed", "differences", "columns", "leaderboard", "grid", "comparison", "retention",
    "published", "progress", "drift", "reading", "keys", "main",
)  # fmt: skip
"""Files of scripts/, in order; they are joined to one script."""


def write_dashboard(
    runs_dir: Path,
    output: Path | None = None,
    reload: float | None = None,
    chosen: Sequence[Path] | None = None,
    added: LoadedDatasets = NO_DATASETS,
) -> Path:
    """Write dashboard.html into `output`, by default into `runs_dir`, and return its path.

    The page links images of runs by relative path, and reloads itself after `reload` seconds; None for never. It shows
    the run folders `chosen`, by default all, and the datasets `added`.

    Raises:
        ConfigError: there is nothing to show or Jinja2 is not installed.
    """
    output = output or runs_dir
    document = make_document(runs_dir, chosen, added) | {
        "root": Path(os.path.relpath(runs_dir, output)).as_posix()
    }
    _check_contents(document, runs_dir, added)
    path = output / FILE
    write_whole(path, render_page(document, reload))
    return path


def write_bundle(
    runs_dir: Path,
    output: Path | None = None,
    chosen: Sequence[Path] | None = None,
    added: LoadedDatasets = NO_DATASETS,
) -> Path:
    """Write the page with its images as one file, dashboard-bundle.html, and return its path.

    Raises:
        ConfigError: see `write_dashboard`.
    """
    path = (output or runs_dir) / BUNDLE
    write_whole(path, render_bundle(runs_dir, chosen, added))
    return path


def render_bundle(
    runs_dir: Path, chosen: Sequence[Path] | None = None, added: LoadedDatasets = NO_DATASETS
) -> str:
    """Return the page with its images: of every run below `runs_dir`, or of the chosen run folders.

    Raises:
        ConfigError: see `write_dashboard`.
    """
    document = make_document(runs_dir, chosen, added)
    _check_contents(document, runs_dir, added)
    return render_page(add_pictures(document, runs_dir))


def _check_contents(document: Mapping[str, Sequence[object]], runs_dir: Path, added: LoadedDatasets) -> None:
    shown = sum(len(document[key]) for key in ("runs", "sweeps", "unfinished", "damaged", "earlier"))
    if shown == len(added.left_out):
        raise ConfigError(f"runs_dir={runs_dir}: holds no runs; start one, or set another folder")


def render_page(document: Mapping[str, object], reload: float | None = None) -> str:
    """Return the page of a document of `make_document`; see `write_dashboard` for `reload`.

    Its content security policy allows only the page's own scripts and images.

    Raises:
        ConfigError: Jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError:
        raise ConfigError(
            'task=dashboard: Jinja2 is not installed; pip install "kvbench[dashboard]"'
        ) from None
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: _read("templates", name)),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    scripts = "\n".join(_strip("scripts", f"{name}.js", ("//", "/*", "*")) for name in SCRIPTS)
    programs = [*map(_inline, VENDORED), f'(() => {{\n"use strict";\n{scripts}\n}})();\n']
    digests = [base64.b64encode(hashlib.sha256(program.encode()).digest()) for program in programs]
    return environment.get_template(TEMPLATE).render(
        styles="\n".join(_strip("styles", f"{name}.css", ("/*",)) for name in STYLES),
        programs=programs,
        hashes=[f"sha256-{digest.decode()}" for digest in digests],
        document=_escape(document),
        reload=None if reload is None else max(1, round(reload)),
    )


def _read(folder: str, name: str) -> str:
    return (files("kvbench.dashboard") / folder / name).read_text(encoding="utf-8")


def _strip(folder: str, name: str, comments: tuple[str, ...]) -> str:
    """Return a file without indentation, comments and empty lines."""
    lines = (line.partition(" // ")[0].strip() for line in _read(folder, name).splitlines())
    return "\n".join(line for line in lines if line and not line.startswith(comments))


def _inline(vendored: Vendored) -> str:
    """Return a vendored script with its licence, without the address of its source map."""
    lines = vendored.read().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("//# sourceMappingURL="))
    return f"/*! {vendored.package} {vendored.version}\n{vendored.read_licence()}*/\n{text}\n"


def _keep_digits(value: object) -> object:
    """Return a document with integers beyond 2^53, which JavaScript would round, as strings."""
    if isinstance(value, Mapping):
        return {key: _keep_digits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_keep_digits(item) for item in value]
    return str(value) if isinstance(value, int) and abs(value) > MAX_INTEGER else value


def _escape(document: Mapping[str, object]) -> str:
    """Return a document as JSON that is safe inside a script element."""
    text = json.dumps(_keep_digits(document), separators=(",", ":"), allow_nan=False, default=str)
    return text.replace("<", "\\u003c")
