"""Tables of published scores of full caches, and the list of sampling presets."""

import re
from collections.abc import Mapping

import yaml

from docs.generator.choices import Choice
from docs.generator.markdown import format_table
from kvbench.report.papers.published import PublishedTable, model_of, prompts_of

PROMPTS = "prompts._target_"
OURS = "ours"
"""Source of the rows measured here, which are written by hand; a cell not measured yet is a hyphen."""


def make_table(table: PublishedTable, old: str) -> str:
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
        own = measured[model].split(" | ") if model in measured else ["-"] * len(columns)
        rows.append((f"`{model}`", OURS, *own))
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
        pairs = [f"{s.key.removeprefix('model.').removeprefix('sampling.')}={s.value}" for s in settings]
        cells = [", ".join(f"`{word}`" for word in words) for words in (own["models"], pairs)]
        link = f"[`{name}`](../conf/sampling/{name}.yaml)"
        rows.append((link, *cells, what, source.partition(": ")[2]))
    return format_table(("`sampling=`", "for `model=`", "settings", "what it is", "source"), rows)
