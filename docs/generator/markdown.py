"""Markdown fragments: tables, field lists, anchors."""

from collections.abc import Iterable, Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; vertical bars within cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def list_fields(rows: Iterable[tuple[str, str]]) -> str:
    """Return a field list: one text per name."""
    return "\n".join(f":{name}: {text}" for name, text in rows)


def make_anchor(heading: str) -> str:
    """Return the anchor of a heading as GitHub and MyST make it."""
    letters = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
    return letters.replace(" ", "-")
