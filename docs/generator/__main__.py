"""Command that rewrites what pages have from their sources and draws their figures: `make docs` runs it.

`python -m docs.generator --check` writes nothing. It prints a line for each file that its sources would change, pins
and pictures of rooms too, with the command that mends it, and fails if there is one.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from docs.generator import figures, lists, pins, rooms

ROOT = Path(__file__).resolve().parents[2]


def find_faults(root: Path) -> Iterator[str]:
    """Yield a line for each file of a checkout that is not what its sources give."""
    pinned = {root / "kvbench" / "assets" / "pins.json": pins.format_pins(pins.measure_pins())}
    for files, remedy in (
        (lists.update_pages(root), "make docs"),
        (rooms.draw_pictures(root), "make rooms"),
        (pinned, "raise `revision` of what gives other results now; then make pins"),
    ):
        for path, text in files.items():
            if path.read_text(encoding="utf-8") != text:
                yield f"{path.relative_to(root)}: {remedy}"
    for name in figures.FIGURES:
        if figures.name_source(root) not in (root / name).read_text(encoding="utf-8"):
            yield f"{name}: make docs"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit("\n".join(find_faults(ROOT)) or None)
    for path, text in lists.update_pages(ROOT).items():
        path.write_text(text, encoding="utf-8")
    figures.write_figures(ROOT)
