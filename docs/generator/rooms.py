"""Picture of the rooms of the code: what imports what, read from the sources, drawn as SVG.

`python docs/generator/rooms.py docs/images/rooms.svg` (`make rooms`) draws it.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

FOLDERS = (
    ("kvbench", "kvbench"),
    ("kernels", "kvbench.kernels"),
    ("eval", "kvbench.eval"),
    ("conf", "kvbench.conf"),
)
"""Folders of a checkout and the packages that they are."""
INNER = (
    *("engine.cache", "engine.coding", "engine.packed"),
    *("runs.execute", "runs.generate", "runs.identity", "runs.record", "runs.score"),
)
"""Folders and files that are rooms of their own inside another one."""
WIDTH, HEIGHT = 130, 76
"""Pixels of a cell of the picture."""


def list_modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and file of every module of a checkout."""
    for folder, name in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            yield ".".join((name, *(part for part in parts if part != "__init__"))), path


@cache
def read_imports(path: Path) -> tuple[str, ...]:
    """Return what a file imports, by full name; every file is parsed once.

    Raises:
        ValueError: a relative import.
    """
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{path}: relative import")
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)


def find_room(name: str) -> str | None:
    """Return the room of a module or of a name in one; None outside kvbench and for its root."""
    top, *parts = name.split(".")
    if top != "kvbench" or not parts or parts[0] == "__version__":
        return None
    inner = ".".join(parts[:2])
    return inner if inner in INNER else parts[0]


def find_arrows(root: Path) -> set[tuple[str, str]]:
    """Return pairs of rooms, the first of which imports the second."""
    return {
        (room, used)
        for module, path in list_modules(root)
        for name in read_imports(path)
        if (room := find_room(module)) and (used := find_room(name)) and used != room
    }


def draw_rooms(arrows: set[tuple[str, str]]) -> str:
    """Return the picture; arrows that follow from others are left out.

    Raises:
        graphlib.CycleError: rooms depend on each other.
    """
    graph: dict[str, set[str]] = {}
    for room, used in arrows:
        graph.setdefault(room, set()).add(used)
    below: dict[str, set[str]] = {}
    floors: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():
        uses = graph.get(room, set())
        below[room] = uses.union(*(below[used] for used in uses))
        floors[room] = 1 + max((floors[used] for used in uses), default=-1)
    top = max(floors.values())
    rows = [sorted(room for room in floors if floors[room] == floor) for floor in range(top, -1, -1)]
    place = {
        room: (WIDTH * x + WIDTH // 2, HEIGHT * y + HEIGHT // 2)
        for y, row in enumerate(rows)
        for x, room in enumerate(row)
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH * max(map(len, rows))}" height="{HEIGHT * len(rows)}" '
        'font-family="sans-serif" font-size="13" text-anchor="middle">'
    ]
    for room, used in sorted(arrows):
        if not any(used in below[other] for other in graph[room]):
            (x1, y1), (x2, y2) = place[room], place[used]
            parts.append(f'<line x1="{x1}" y1="{y1 + 14}" x2="{x2}" y2="{y2 - 14}" stroke="#999"/>')
    for room, (x, y) in sorted(place.items()):
        parts.append(
            f'<rect x="{x - 58}" y="{y - 14}" width="116" height="28" rx="5" fill="#eef" stroke="#447"/>'
        )
        parts.append(f'<text x="{x}" y="{y + 5}">{room}</text>')
    return "\n".join((*parts, "</svg>", ""))


if __name__ == "__main__":
    checkout = Path(__file__).resolve().parents[2]
    Path(sys.argv[1]).write_text(draw_rooms(find_arrows(checkout)))
