"""Tables of choices in the pages: every method, model, prompt set, metric and sweep of `conf/`."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from docs.generator.baselines import list_presets, make_table
from docs.generator.choices import Choice, build, list_choices
from docs.generator.markdown import format_table, make_anchor
from docs.generator.measured import FOLDER, read_rows, read_sections
from kvbench.cli.tasks.listing import split_paper
from kvbench.methods.shared.base import Method
from kvbench.methods.shared.calibration import Observer
from kvbench.models.files.hub import format_bytes
from kvbench.report.papers.published import find

FAMILIES = {
    ("next-scale", "next-token"): "scales, tokens",
    ("next-scale",): "scales",
    ("next-token",): "tokens",
}
GROUPS = {
    "docs/methods.md": "method",
    "docs/models.md": "model",
    "docs/prompts.md": "prompts",
    "docs/metrics.md": "eval",
    "docs/reproduction.md": "sampling",
    "docs/tables.md": "sweeps",
    "docs/runs.md": "tasks",
}
"""Pages with a list from `conf/`, and the group that each lists."""
MADE = re.compile(
    r"(?P<mark><!-- made by `make docs` from (?P<source>[^\n]+) -->\n\n)(?P<old>.*?)(?=\n\n<!-- end -->)",
    re.DOTALL,
)
"""Part of a page that this program writes, below the comment that names its source."""
TASK = re.compile(r"^task=(\w+) +(.+)$", re.MULTILINE)
EXAMPLE = re.compile(r"(?<=<!-- file: eval/paired/mae.py -->\n```python\n).*?(?=```)", re.DOTALL)


def update_pages(root: Path) -> dict[Path, str]:
    """Return pages of a checkout with their lists and tables, and the one on extending it with the plugin's metric."""
    names = (*GROUPS, *(f"{FOLDER}/{path.name}" for path in sorted((root / FOLDER).glob("*.md"))))
    pages = {root / name: update_page(root, name, (root / name).read_text("utf-8")) for name in names}
    extending = root / "docs" / "extending.md"
    code = (root / "docs" / "examples" / "plugin" / "kvbench_example" / "mae.py").read_text(encoding="utf-8")
    return {**pages, extending: EXAMPLE.sub(lambda _: code, extending.read_text(encoding="utf-8"))}


def update_page(root: Path, page: str, text: str) -> str:
    """Return the text of a page with its lists and tables as their sources have them now.

    Raises:
        ValueError: the page of a group has no place for a list, or a table is damaged.
    """
    if page in GROUPS and not MADE.search(text):
        raise ValueError(f"{page}: no list between its two comments")
    return MADE.sub(lambda made: made["mark"] + _make_part(root, page, made["source"], made["old"]), text)


def _make_part(root: Path, page: str, source: str, old: str) -> str:
    if source.endswith(".csv"):
        header, *rows = read_rows(root / FOLDER / source)
        return format_table(header, rows)
    if source != "conf":
        return make_table(find(source.removeprefix("published.yaml: ")), old)
    group = GROUPS[page]
    if group == "tasks":
        return _list_tasks(root)
    choices = {choice.name: choice for choice in list_choices(root / "conf" / group)}
    if group == "method":
        return _list_methods(choices)
    if group == "model":
        return _list_models(choices)
    if group == "sampling":
        return list_presets(choices)
    return _list_sweeps(choices, root) if group == "sweeps" else _list_plain(group, choices)


def _list_tasks(root: Path) -> str:
    config = yaml.safe_load((root / "conf" / "config.yaml").read_text(encoding="utf-8"))
    tasks = TASK.findall(config["hydra"]["help"]["header"])
    return format_table(("task", "what it does"), [(f"`{name}`", text) for name, text in tasks])


def name_calibration(method: Method) -> str:
    """Return the name of the calibration that a method needs; empty if it needs none."""
    needs = method.needs()
    return needs.kind if isinstance(needs, Observer) else ""


def _link(group: str, name: str) -> str:
    return f"[`{name}`](../conf/{group}/{name}.yaml)"


def _join(choice: Choice) -> str:
    return " ".join(choice.comment).replace("<", "&lt;")


def _list_methods(choices: Mapping[str, Choice]) -> str:
    objects: dict[str, Method] = build("method", choices)
    rows = []
    for name, method in objects.items():
        text, paper = split_paper(_join(choices[name]))
        reads = "positions" if method.static else "cache"
        about = (reads, name_calibration(method), FAMILIES[method.families], paper)
        rows.append((_link("method", name), text, *about))
    return format_table(("method", "what it keeps", "looks at", "calibration", "models", "paper"), rows)


def _list_models(choices: Mapping[str, Choice]) -> str:
    rows = []
    for name, model in build("model", choices).items():
        if model.transformer is None:
            rows.append((_link("model", name), "tokens", *["as in config.json"] * 4, "yours"))
            continue
        spec = model.spec
        draws = "scales" if spec.family == "next-scale" else "tokens"
        shape = f"{spec.layers} x {spec.heads} x {spec.head_dim}"
        sizes = (shape, f"{spec.cached_length:,}", f"{spec.full_tokens:,}", _format_size(model.parameters))
        rows.append((_link("model", name), draws, *sizes, _name_weights(model)))
    header = ("model", "draws", "layers x KV heads x channels", "tokens per head", "tokens of the full cache")
    return format_table((*header, "parameters, in 16 bits", "weights"), rows)


def _format_size(parameters: int) -> str:
    """Write a number of parameters and the bytes of a file that holds them in 16 bits."""
    count = f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"
    return f"{count}, {format_bytes(2 * parameters)}"


def _name_weights(model: Any) -> str:
    """Return the repositories of a model's weights, the package that has them, or `shipped`."""
    paths = (one.path or "" for one in model.sources.values())
    packages = [path.split("/")[2] for path in paths if path.startswith("pkg://")]
    if packages and packages[0] != "kvbench":
        return f"package `{packages[0]}`"
    if packages:
        return "shipped"
    return ", ".join(dict.fromkeys(f"`{source.repo}`" for source in model.sources.values() if source.repo))


def _list_plain(group: str, choices: Mapping[str, Choice]) -> str:
    """List prompt sets or metrics, with the files that they need."""
    rows = []
    for name, choice in choices.items():
        notes = (s.note for s in choice.settings if s.key.rpartition(".")[2] == "path")
        files = next(notes, "").partition(";")[0]
        download = ", or `prompts.download=true`" if "download" in choice.values else ""
        rows.append((_link(group, name), _join(choice), files + download))
    return format_table((f"`{group}=`", "what it is", "files"), rows)


def _list_sweeps(choices: Mapping[str, Choice], root: Path) -> str:
    sections = list(read_sections(root))
    rows = []
    for name, choice in choices.items():
        source = find(choice.values["published"]).source if "published" in choice.values else ""
        text = (root / "conf" / "sweeps" / f"{name}.yaml").read_text(encoding="utf-8")
        model = re.search(r"(?:^ *|override /)model: (\w+)", text, re.MULTILINE)
        sentence = re.split(r"(?<=[\w)])\. |: python run", _join(choice))[0].rstrip(".") + "."
        about = (sentence, f"`{model[1] if model else 'infinity_tiny'}`", source, _find(name, sections))
        rows.append((_link("sweeps", name), *about))
    return format_table(("sweep", "what it compares", "model", "published in", "measured"), rows)


def _find(name: str, sections: Iterable[tuple[str, str]]) -> str:
    """Return a link to the section of the results whose commands run a sweep."""
    for page, section in sections:
        if re.search(rf"sweeps={name}[ \n`]", section):
            heading = section.partition("\n")[0]
            return f"[{heading}](results/{page}#{make_anchor(heading)})"
    return ""
