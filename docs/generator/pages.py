"""Pages out of `conf/`, docstrings and measured tables; none of them is kept in the repository."""

import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import hydra

from generator.choices import Choice, Setting, list_choices
from generator.docstrings import describe
from generator.markdown import format_table, list_fields, make_anchor
from generator.measured import Table, read_tables
from generator.sweeps import list_sweeps
from kvbench.cli.compose import hydra_of_kvbench
from kvbench.methods.base import Method, Observer

DIFFERS = (
    "Differs from the paper in: ",
    "Differs from the papers in: ",
    "Differs from the official programs in: ",
)
FAMILIES = {
    ("next-scale", "next-token"): "scales, tokens",
    ("next-scale",): "scales",
    ("next-token",): "tokens",
}
AGAIN = 0.6
"""Likeness of two descriptions from which on one of them is enough."""


def write_pages(root: Path, out: Path) -> None:
    """Write every generated page; a file that would stay as it is is left alone, and those of before are removed.

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
    results = (root / "docs" / "results.md").read_text(encoding="utf-8")
    tables = read_tables(results)
    methods = {choice.name: choice for choice in list_choices(conf / "method")}
    with hydra_of_kvbench():
        objects = {name: _build("method", name) for name in methods}
        models = {choice.name: _build("model", choice.name) for choice in list_choices(conf / "model")}
    pages = {f"methods/{name}.md": _write_method(methods, objects, name, tables, conf) for name in methods}
    cards = sorted((root / "kvbench" / "assets").glob("*/README.md"))
    pages |= {f"cards/{path.parent.name}.md": _copy_card(path) for path in cards}
    pages["methods.md"] = _list_methods(methods, objects)
    pages["models.md"] = _list_models(list_choices(conf / "model"), models)
    pages["prompts.md"] = _list_group("prompts", list_choices(conf / "prompts"))
    pages["evaluators.md"] = _list_group("eval", list_choices(conf / "eval"))
    pages["sweeps.md"] = list_sweeps(conf / "sweeps", results)
    return pages


def _copy_card(path: Path) -> str:
    """Return the card of a model that ships, its links as they are from here."""
    text = re.sub(r"\]\(\.\./(\w+)/README\.md\)", r"](\1.md)", path.read_text(encoding="utf-8"))
    return text.replace("](../../../docs/", "](../../")


def _build(group: str, name: str) -> Any:
    """Return the object that a choice stands for."""
    return hydra.utils.instantiate(hydra.compose("config", overrides=[f"{group}={name}"])[group])


def _write_method(
    choices: Mapping[str, Choice],
    objects: Mapping[str, Method],
    name: str,
    tables: Iterable[Table],
    conf: Path,
) -> str:
    choice, method = choices[name], objects[name]
    told = describe(type(method))
    parts = [f"# {name}", " ".join(choice.comment), _tell_facts(method)]
    others = [other for other, it in objects.items() if type(it) is type(method) and other != name]
    if others:
        links = ", ".join(f"[`{other}`]({other}.md)" for other in others)
        parts.append(f"The same class under other settings: {links}.")
    chosen = " method=" if "next-scale" in method.families else " model=llamagen_tiny method="
    parts += [
        "<!-- takes: 96 images, and as many of the reference -->\n"
        f"```bash\npython run.py{chosen}{name} budget=0.1\n```",
        "## What it does",
        *(_format_paragraph(paragraph) for paragraph in told.paragraphs),
        "## Settings",
        _list_settings("method", choice.settings, told.settings) or "None.",
    ]
    variants = list_choices(conf / "method" / name) if (conf / "method" / name).is_dir() else []
    if variants:
        rows = [(f"`method={name}/{v.name}`", " ".join(v.comment), _join_values(v)) for v in variants]
        parts += ["## Named settings", format_table(("choice", "what it is", "what it sets"), rows)]
    return "\n\n".join([*parts, "## Measured", *_show_measured(name, tables)]) + "\n"


def _tell_facts(method: Method) -> str:
    needs = method.needs()
    calibration = needs.kind if isinstance(needs, Observer) else "none"
    budget = "none: what it keeps depends on the input or on its settings, and its peak is measured"
    if method.budgeted:
        budget = (
            "strict: exceeding it is an error" if method.strict else "not strict: the measured peak counts"
        )
    decides = "positions alone (`static`)" if method.static else "what the cache shows while it runs"
    rows = [
        ("models that draw", FAMILIES[method.families]),
        ("calibration", calibration),
        ("budget", budget),
        ("decides by", decides),
        ("class", f"`{type(method).__module__}.{type(method).__qualname__}`"),
    ]
    return list_fields(rows)


def _format_paragraph(text: str) -> str:
    """Set what differs from the paper apart."""
    for opening in DIFFERS:
        if text.startswith(opening):
            return f"**{opening.strip()}** {text.removeprefix(opening)}"
    return text


def _list_settings(group: str, settings: Iterable[Setting], told: Mapping[str, str]) -> str:
    rows = [(f"`{group}.{s.key}`", f"`{s.value}`", _explain(told.get(s.key, ""), s.note)) for s in settings]
    return format_table(("setting", "default", "meaning"), rows) if rows else ""


def _explain(told: str, note: str) -> str:
    """Return what a docstring tells of a setting and what its file notes, unless that says it again."""
    again = SequenceMatcher(None, told.lower(), note.lower()).ratio() > AGAIN
    return told if again else "<br>".join(filter(None, (told, note)))


def _join_values(choice: Choice) -> str:
    return ", ".join(f"`{s.key}={s.value}`" for s in choice.settings)


def _show_measured(name: str, tables: Iterable[Table]) -> list[str]:
    """Return a method's rows of the page of results, each table under its commands."""
    own = [table.pick_rows(name) for table in tables]
    found = [table for table in own if table.rows]
    if not found:
        return ["Not measured: no table of [the results](../../results.md) has a row of it."]
    parts = []
    for i, table in enumerate(found):
        if i == 0 or table.section != found[i - 1].section:
            parts.append(f"### [{table.section}](../../results.md#{make_anchor(table.section)})")
            parts.append(table.commands)
        parts += [table.caption] if table.caption else []
        keep = 0 if any("," in row[0] for row in table.rows) else 1
        parts.append(format_table(table.header[keep:], [row[keep:] for row in table.rows]))
    return parts


def _list_methods(choices: Mapping[str, Choice], objects: Mapping[str, Method]) -> str:
    rows = []
    for name, choice in choices.items():
        needs = objects[name].needs()
        calibration = needs.kind if isinstance(needs, Observer) else ""
        link = f"[`{name}`](generated/methods/{name}.md)"
        rows.append((link, " ".join(choice.comment), FAMILIES[objects[name].families], calibration))
    return format_table(("method", "what it keeps", "models that draw", "calibration"), rows) + "\n"


def _list_models(choices: Iterable[Choice], models: Mapping[str, Any]) -> str:
    rows, parts = [], []
    for choice in choices:
        spec = models[choice.name].spec
        per = "scales" if spec.family == "next-scale" else "tokens"
        shape = f"{spec.layers} x {spec.heads} x {spec.head_dim}"
        sizes = (shape, f"{spec.cached_length:,}", f"{spec.full_tokens:,}")
        rows.append(
            (
                f"[`{choice.name}`](#{make_anchor(choice.name)})",
                per,
                *sizes,
                _tell_weights(models[choice.name]),
            )
        )
        noted = [setting for setting in choice.settings if setting.note]
        parts += [f"### {choice.name}", *map(_quote_keys, choice.comment)]
        parts += [text] if (text := _list_settings("model", noted, {})) else []
    header = ("model", "draws", "layers x KV heads x channels", "cached a head", "full cache", "weights")
    return "\n\n".join([format_table(header, rows), *parts]) + "\n"


def _tell_weights(model: Any) -> str:
    """Return where a model's files come from."""
    shipped = any((source.path or "").startswith("pkg://") for source in model.sources.values())
    files = dict.fromkeys(f"`{source.repo}`" for source in model.sources.values())
    return "ship" if shipped else ", ".join(files)


def _quote_keys(text: str) -> str:
    """Put what stands in angle brackets into code, since a browser would take it for a tag."""
    return text.replace("<40 hex>", "`<40 hex>`")


def _list_group(group: str, choices: Iterable[Choice]) -> str:
    parts = []
    for choice in choices:
        parts += [f"### {group}={choice.name}", *choice.comment]
        parts += [text] if (text := _list_settings(group, choice.settings, {})) else []
    return "\n\n".join(parts) + "\n"
