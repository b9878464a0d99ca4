"""The part of a page that lists sweeps: what each goes through, what it needs, what was published and measured."""

from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from generator.choices import Choice, list_choices, read_sweep
from generator.docstrings import join
from generator.markdown import format_table, list_fields, make_anchor
from kvbench.cli.sweeper import split_product
from kvbench.report.published import PublishedTable, find


def list_sweeps(folder: Path, results: str) -> str:
    """Return a section for every sweep of a folder; `results` is the page of measured ones."""
    return "\n\n".join(_write_sweep(choice, folder, results) for choice in list_choices(folder)) + "\n"


def _write_sweep(choice: Choice, folder: Path, results: str) -> str:
    path = folder / f"{choice.name}.yaml"
    lists = {key: values.strip("'").split(",") for key, values in read_sweep(path).items()}
    model = lists.get("model", [_read_model(path)])[0]
    shipped = model.endswith("_tiny")
    needs = "nothing: the weights ship" if shipped else f"weights of {model}, a GPU, prompts from the network"
    words = OverridesParser.create().parse_overrides([f"{key}={v}" for key, v in read_sweep(path).items()])
    count = len(split_product(words))
    mark = f"takes: {count} runs at most, and the reference" if shipped else f"needs: {needs}"
    table = find(choice.values["published"]) if "published" in choice.values else None
    fields = [
        *((f"`{key}`", ", ".join(f"`{value}`" for value in values)) for key, values in lists.items()),
        ("model", f"`{model}`"),
        ("needs", needs),
        (
            "published",
            "nothing: a comparison of our own" if table is None else f"{table.source}, {table.title}",
        ),
        ("measured here", _find_measured(choice.name, results)),
    ]
    parts = [
        f"### sweeps={choice.name}",
        join(" ".join(choice.comment)),
        f"<!-- {mark} -->\n```bash\npython run.py -m sweeps={choice.name}\n```",
        list_fields(fields),
    ]
    return "\n\n".join([*parts, *_show_published(table)])


def _read_model(path: Path) -> str:
    """Return the model that a sweep's own defaults choose, and the program's where they choose none."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return next(
        (line.split(": ")[1] for line in lines if line.startswith("- override /model: ")), "infinity_tiny"
    )


def _show_published(table: PublishedTable | None) -> list[str]:
    """Return a published table in a fold, a part for every model."""
    if table is None or not table.metrics:
        return []
    parts = [f"<details>\n<summary>What was published ({table.data})</summary>"]
    for label, rows in table.models.items():
        cells = [
            (
                *(", ".join(f"`{value}`" for value in row.where.get(key, ())) for key in table.keys),
                *(row.cells[metric] or "" for metric in table.metrics),
            )
            for row in rows
        ]
        parts += [f"**{label}**", format_table((*table.keys, *table.metrics), cells)]
    return [*parts, "</details>"]


def _find_measured(name: str, results: str) -> str:
    """Return a link to the section of the results whose commands run a sweep."""
    for section in results.split("\n## ")[1:]:
        if any(f"sweeps={name}{end}" in section for end in (" ", "\n", "`")):
            heading = section.partition("\n")[0]
            return f"[{heading}](results.md#{make_anchor(heading)})"
    return "not measured"
