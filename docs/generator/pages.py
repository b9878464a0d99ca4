"""Pages that only the site has: one per method, the models' cards, and files of the repository's root."""

import inspect
import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import NamedTuple

from docs.generator.choices import Choice, Setting, build, list_choices
from docs.generator.lists import FAMILIES, name_calibration
from docs.generator.markdown import format_table, list_fields, make_anchor
from docs.generator.measured import Table, read_tables
from kvbench.methods.shared.base import Method

DIFFERS = (
    "Differs from the paper in: ",
    "Differs from the papers in: ",
    "Differs from the official programs in: ",
)
ROOT_PAGES = ("AGENTS", "CHANGELOG", "CONTRIBUTING", "README", "THIRD_PARTY")
"""Files of the repository's root that the site shows."""
SIMILAR = 0.6
"""Similarity above which two descriptions of a setting count as the same."""
SECTION = re.compile(r"^(?:Attributes|Args):\n", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+): (.*(?:\n     +.*)*)", re.MULTILINE)


class Described(NamedTuple):
    """Paragraphs of a class's docstring, each in one line, and descriptions of its fields, also of inherited ones."""

    paragraphs: tuple[str, ...]
    settings: dict[str, str]


def write_pages(root: Path, out: Path) -> None:
    """Write every generated page; leave unchanged files alone and remove pages that no longer exist.

    Args:
        root: the checkout.
        out: folder that holds nothing else.
    """
    pages = make_pages(root)
    for path in out.rglob("*.md"):
        if path.relative_to(out).as_posix() not in pages:
            path.unlink()
    for name, text in pages.items():
        path = out / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def make_pages(root: Path) -> dict[str, str]:
    """Return every generated page by its path below `docs/generated`."""
    conf = root / "conf"
    tables = read_tables(root)
    methods = {choice.name: choice for choice in list_choices(conf / "method")}
    objects: dict[str, Method] = build("method", methods)
    pages = {f"methods/{name}.md": _write_method(methods, objects, name, tables, conf) for name in methods}
    cards = (root / "kvbench" / "assets").glob("*/README.md")
    pages |= {f"cards/{path.parent.name}.md": _copy_card(path) for path in cards}
    pages |= {f"{name.lower()}.md": _copy_page(root / f"{name}.md") for name in ROOT_PAGES}
    return pages


def _copy_card(path: Path) -> str:
    """Return the card of a shipped model, with links that work from its page."""
    text = re.sub(r"\]\(\.\./(\w+)/README\.md\)", r"](\1.md)", path.read_text(encoding="utf-8"))
    return text.replace("](../../../docs/", "](../../")


def _copy_page(path: Path) -> str:
    """Return a page of the repository's root, with links that work from `docs/generated`."""
    text = re.sub(r"\]\((?![a-z]+:|#)", "](../../", path.read_text(encoding="utf-8"))
    for name in ROOT_PAGES:
        text = text.replace(f"](../../{name}.md", f"]({name.lower()}.md")
    return text.replace("](../../docs/", "](../")


def _write_method(
    choices: Mapping[str, Choice],
    objects: Mapping[str, Method],
    name: str,
    tables: Iterable[Table],
    conf: Path,
) -> str:
    choice, method = choices[name], objects[name]
    described = describe(type(method))
    parts = [f"# {name}", " ".join(choice.comment), _list_facts(method)]
    others = [other for other, it in objects.items() if type(it) is type(method) and other != name]
    if others:
        links = ", ".join(f"[`{other}`]({other}.md)" for other in others)
        parts.append(f"The same class under other settings: {links}.")
    chosen = " method=" if "next-scale" in method.families else " model=llamagen_tiny method="
    parts += [
        "<!-- takes: 96 images, and as many of the reference -->\n"
        f"```bash\npython run.py{chosen}{name} budget=0.1\n```",
        "## What it does",
        *(_format_paragraph(paragraph) for paragraph in described.paragraphs),
        "## Settings",
        _list_settings(choice.settings, described.settings) or "None.",
    ]
    variants = list_choices(conf / "method" / name) if (conf / "method" / name).is_dir() else []
    if variants:
        rows = [(f"`method={name}/{v.name}`", " ".join(v.comment), _join_values(v)) for v in variants]
        parts += ["## Named settings", format_table(("choice", "description", "settings"), rows)]
    return "\n\n".join([*parts, "## Measured", *_show_measured(name, tables)]) + "\n"


def describe(cls: type) -> Described:
    """Split a class's docstring; fields of base classes are included."""
    text = SECTION.split(inspect.cleandoc(cls.__doc__ or ""))[0]
    settings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        _, *sections = SECTION.split(inspect.cleandoc(base.__dict__.get("__doc__") or ""))
        settings |= {
            name: _join_lines(words) for section in sections for name, words in ENTRY.findall(section)
        }
    return Described(tuple(_join_lines(paragraph) for paragraph in text.strip().split("\n\n")), settings)


def _join_lines(text: str) -> str:
    return " ".join(text.split())


def _list_facts(method: Method) -> str:
    budget = "none: memory depends on the input or on settings; tables show the measured peak"
    if method.budgeted:
        budget = (
            "strict: exceeding it is an error"
            if method.strict
            else "not strict: tables show the measured peak"
        )
    looks_at = "positions alone (`static`)" if method.static else "the cache's contents while it runs"
    rows = [
        ("models that draw", FAMILIES[method.families]),
        ("calibration", name_calibration(method) or "none"),
        ("budget", budget),
        ("looks at", looks_at),
        ("class", f"`{type(method).__module__}.{type(method).__qualname__}`"),
    ]
    return list_fields(rows)


def _format_paragraph(text: str) -> str:
    """Set differences from the paper in bold."""
    for opening in DIFFERS:
        if text.startswith(opening):
            return f"**{opening.strip()}** {text.removeprefix(opening)}"
    return text


def _list_settings(settings: Iterable[Setting], described: Mapping[str, str]) -> str:
    rows = [
        (f"`method.{s.key}`", f"`{s.value}`", _explain(described.get(s.key, ""), s.note)) for s in settings
    ]
    return format_table(("setting", "default", "meaning"), rows) if rows else ""


def _explain(described: str, note: str) -> str:
    """Join the docstring and the file's comment of a setting; leave the comment out if it repeats the docstring."""
    repeats = SequenceMatcher(None, described.lower(), note.lower()).ratio() > SIMILAR
    return described if repeats else "<br>".join(filter(None, (described, note)))


def _join_values(choice: Choice) -> str:
    return ", ".join(f"`{s.key}={s.value}`" for s in choice.settings)


def _show_measured(name: str, tables: Iterable[Table]) -> list[str]:
    """Return a method's rows of the results, each table under its commands."""
    own = [table.pick_rows(name) for table in tables]
    measured = [table for table in own if table.rows]
    if not measured:
        return ["Not measured: no table of [the results](../../results.md) has a row of it."]
    parts = ["The linked pages say how to read the columns, and compare other methods."]
    for i, table in enumerate(measured):
        if i == 0 or table.section != measured[i - 1].section:
            parts.append(f"### [{table.section}](../../results/{table.page}#{make_anchor(table.section)})")
            parts.append(table.commands)
        parts += [table.caption] if table.caption else []
        keep = 0 if any("," in row[0] for row in table.rows) else 1
        parts.append(format_table(table.header[keep:], [row[keep:] for row in table.rows]))
    return parts
