"""Tables of choices in the pages: every method, model, prompt set, metric and sweep of `conf/`."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from generator.baselines import list_presets, write_tables
from generator.choices import Choice, build, list_choices
from generator.markdown import format_table, make_anchor
from generator.measured import read_sections
from kvbench.methods.shared.base import Method, Observer
from kvbench.models.files.hub import format_bytes
from kvbench.report.papers.published import find

FAMILIES = {
    ("next-scale", "next-token"): "scales, tokens",
    ("next-scale",): "scales",
    ("next-token",): "tokens",
}
PAGES = {
    "method": "docs/methods.md",
    "model": "docs/models.md",
    "prompts": "docs/prompts.md",
    "eval": "docs/metrics.md",
    "sampling": "docs/reproduction.md",
    "sweeps": "docs/tables.md",
}
"""The page that lists the choices of each group."""
LIST = re.compile(r"(?<=<!-- made by `make docs` from conf -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)

EXAMPLE = re.compile(r"(?<=<!-- file: eval/paired/mae.py -->\n```python\n).*?(?=```)", re.DOTALL)


def write_lists(root: Path) -> None:
    """Rewrite the list in each page of a checkout, and the metric in the page on extending it."""
    for group, page in PAGES.items():
        (root / page).write_text(update_page(root, group), encoding="utf-8")
    write_tables(root)
    (root / "README.md").write_text(update_readme(root), encoding="utf-8")
    extending = root / "docs" / "extending.md"
    code = (root / "docs" / "examples" / "plugin" / "kvbench_example" / "mae.py").read_text(encoding="utf-8")
    extending.write_text(EXAMPLE.sub(lambda _: code, extending.read_text(encoding="utf-8")), encoding="utf-8")


def update_page(root: Path, group: str) -> str:
    """Return the text of the page that lists a group, with its list as `conf/` has it now.

    Raises:
        ValueError: the page has no place for a list.
    """
    text = (root / PAGES[group]).read_text(encoding="utf-8")
    old = LIST.search(text)
    if old is None:
        raise ValueError(f"{PAGES[group]}: no list between its two comments")
    choices = {choice.name: choice for choice in list_choices(root / "conf" / group)}
    if group == "method":
        table = _list_methods(choices, old[0])
    elif group == "model":
        table = _list_models(choices)
    elif group == "sampling":
        table = list_presets(choices)
    elif group == "sweeps":
        table = _list_sweeps(choices, root)
    else:
        table = _list_plain(group, choices)
    return text[: old.start()] + table + text[old.end() :]


def update_readme(root: Path) -> str:
    """Return the text of README.md, with the names, views and papers of the methods that docs/methods.md lists."""
    listed = LIST.search((root / PAGES["method"]).read_text(encoding="utf-8"))
    lines = [] if listed is None else listed[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    kept = [(row[0].replace("(../", "("), row[2], row[4], row[5]) for row in rows]
    table = format_table(("method", "looks at", "models", "paper"), kept)
    return LIST.sub(lambda _: table, (root / "README.md").read_text(encoding="utf-8"))


def name_calibration(method: Method) -> str:
    """Return the name of the calibration that a method needs; empty if it needs none."""
    needs = method.needs()
    return needs.kind if isinstance(needs, Observer) else ""


def _link(group: str, name: str) -> str:
    return f"[`{name}`](../conf/{group}/{name}.yaml)"


def _join(choice: Choice) -> str:
    return " ".join(choice.comment).replace("<", "&lt;")


def _list_methods(choices: Mapping[str, Choice], old: str) -> str:
    """List methods. The last column, the paper, is written by hand: it is kept from the old table."""
    papers = dict(re.findall(r"^\| \[`(\w+)`\].* \| (.*) \|$", old, re.MULTILINE))
    objects: dict[str, Method] = build("method", choices)
    rows = [
        (
            _link("method", name),
            _join(choices[name]),
            "positions" if method.static else "cache",
            name_calibration(method),
            FAMILIES[method.families],
            papers.get(name, ""),
        )
        for name, method in objects.items()
    ]
    return format_table(("method", "what it keeps", "looks at", "calibration", "models", "paper"), rows)


def _list_models(choices: Mapping[str, Choice]) -> str:
    rows = []
    for name, model in build("model", choices).items():
        spec = model.spec
        draws = "scales" if spec.family == "next-scale" else "tokens"
        shape = f"{spec.layers} x {spec.heads} x {spec.head_dim}"
        sizes = (shape, f"{spec.cached_length:,}", f"{spec.full_tokens:,}", _format_size(model.parameters))
        rows.append((_link("model", name), draws, *sizes, _name_weights(model)))
    header = (
        "model",
        "draws",
        "layers x KV heads x channels",
        "tokens per head",
        "tokens of the full cache",
        "parameters, in 16 bits",
        "weights",
    )
    return format_table(header, rows)


def _format_size(parameters: int) -> str:
    """Write a number of parameters and the bytes of a file that holds them in 16 bits."""
    count = f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"
    return f"{count}, {format_bytes(2 * parameters)}"


def _name_weights(model: Any) -> str:
    """Return the repositories of a model's weights, or `shipped`."""
    if any((source.path or "").startswith("pkg://") for source in model.sources.values()):
        return "shipped"
    return ", ".join(dict.fromkeys(f"`{source.repo}`" for source in model.sources.values() if source.repo))


def _list_plain(group: str, choices: Mapping[str, Choice]) -> str:
    """List prompt sets or metrics, with the files that they need."""
    rows = []
    for name, choice in choices.items():
        files = next((s.note for s in choice.settings if s.key.rpartition(".")[2] == "path"), "").partition(
            ";"
        )[0]
        download = ", or `prompts.download=true`" if "download" in choice.values else ""
        rows.append((_link(group, name), _join(choice), files + download))
    return format_table((f"`{group}=`", "what it is", "files"), rows)


def _list_sweeps(choices: Mapping[str, Choice], root: Path) -> str:
    sections = list(read_sections(root))
    rows = []
    for name, choice in choices.items():
        source = find(choice.values["published"]).source if "published" in choice.values else ""
        text = (root / "conf" / "sweeps" / f"{name}.yaml").read_text(encoding="utf-8")
        model = re.search(r"^ *(?:- override /)?model: (\w+)", text, re.MULTILINE)
        sentence = re.split(r"(?<=[\w)])\. |: python run", _join(choice))[0].rstrip(".") + "."
        rows.append(
            (
                _link("sweeps", name),
                sentence,
                f"`{model[1] if model else 'infinity_tiny'}`",
                source,
                _find(name, sections),
            )
        )
    return format_table(("sweep", "what it compares", "model", "published in", "measured"), rows)


def _find(name: str, sections: Iterable[tuple[str, str]]) -> str:
    """Return a link to the section of the results whose commands run a sweep."""
    for page, section in sections:
        if re.search(rf"sweeps={name}[ \n`]", section):
            heading = section.partition("\n")[0]
            return f"[{heading}](results/{page}#{make_anchor(heading)})"
    return ""
