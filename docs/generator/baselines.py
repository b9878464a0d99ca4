"""Tables of published scores of full caches, and the list of sampling presets."""

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from generator.choices import Choice
from generator.markdown import format_table
from kvbench.report.papers.published import PublishedTable, find, model_of, prompts_of

PAGE = "docs/reproduction.md"
TABLES = ("reproduction", "reproduction_classes", "reproduction_texts")
PROMPTS = "prompts._target_"
OURS = "ours"
"""Who measured the rows that are written by hand; a hyphen where nobody has yet."""


def update_tables(text: str) -> str:
    """Return the text of the page with the tables of `published.yaml`; rows of ours are kept.

    Raises:
        ValueError: the page has no place for a table.
    """
    for name in TABLES:
        start, end = f"<!-- made by `make docs` from published.yaml: {name} -->\n\n", "\n\n<!-- end -->"
        before, found, rest = text.partition(start)
        old, ended, after = rest.partition(end)
        if not (found and ended):
            raise ValueError(f"{PAGE}: no place for the table {name}")
        text = before + start + _make_table(find(name), old) + end + after
    return text


def write_tables(root: Path) -> None:
    """Rewrite the tables in the page of a checkout."""
    path = root / PAGE
    path.write_text(update_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


def _make_table(table: PublishedTable, old: str) -> str:
    """Return a row for each model and source, and one for what was measured here, kept from the old table."""
    columns = list(dict.fromkeys(column for label in table.models for column in _find_cells(table, label)))
    several = len({prompts for prompts, _ in columns}) > 1
    header = [f"{prompts}: `{metric}`" if several else f"`{metric}`" for prompts, metric in columns]
    measured = dict(re.findall(rf"^\| `(\w+)` \| {OURS} \| (.*) \|$", old, re.MULTILINE))
    rows: list[tuple[str, ...]] = []
    for model in dict.fromkeys(map(model_of, table.models)):
        for label in (label for label in table.models if model_of(label) == model):
            cells, by = _find_cells(table, label), prompts_of(label)
            printed = (cells.get(column, "-") for column in columns)
            rows.append((f"`{model}`", f"{by}: {table.sources[by]}", *printed))
        kept = measured[model].split(" | ") if model in measured else ["-"] * len(columns)
        rows.append((f"`{model}`", OURS, *kept))
    return format_table(("model", "full cache, by", *header), rows)


def _find_cells(table: PublishedTable, label: str) -> dict[tuple[str, str], str]:
    """Return what a source gives for a model, by prompt set and metric."""
    return {
        (row.where[PROMPTS][0].rpartition(".")[2], metric): cell
        for row in table.models[label]
        for metric, cell in row.cells.items()
        if cell is not None
    }


def list_presets(choices: Mapping[str, Choice]) -> str:
    """Return the table of the files of `conf/sampling`."""
    rows = []
    for name, choice in choices.items():
        own = yaml.safe_load(choice.values["sampling"])
        what, _, source = " ".join(choice.comment).partition(" Source")
        settings = [s for s in choice.settings if s.key.startswith("model.")]
        rows.append(
            (
                f"[`{name}`](../conf/sampling/{name}.yaml)",
                ", ".join(f"`{model}`" for model in own["models"]),
                ", ".join(
                    f"`{s.key.removeprefix('model.').removeprefix('sampling.')}={s.value}`" for s in settings
                ),
                what,
                source.partition(": ")[2],
            )
        )
    return format_table(("`sampling=`", "for `model=`", "settings", "what it is", "source"), rows)
