"""Picture of the rooms of the code: what imports what, read from the sources, drawn as SVG.

`python docs/generator/rooms.py docs/images/rooms.svg` (`make rooms`) draws it.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from statistics import fmean

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
WIDTH, LANE, HEIGHT = 136, 26, 70
"""Pixels: width of a room, width of a line that passes between rooms, height of a floor."""
SWEEPS = 24
"""Rounds that order each floor by the places of its neighbours, so that few lines cross."""

Node = tuple[str, ...]
"""A room (its name), or the place where a line passes a floor (both of its rooms and the floor)."""


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


def find_floors(arrows: set[tuple[str, str]]) -> tuple[dict[str, int], set[tuple[str, str]]]:
    """Return the floor of every room, 0 at the bottom, and the arrows that do not follow from others.

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
    return floors, {pair for pair in arrows if not any(pair[1] in below[other] for other in graph[pair[0]])}


def place_nodes(floors: dict[str, int], lines: list[list[Node]]) -> dict[Node, tuple[int, int]]:
    """Return the pixel at the centre of every node; no line passes through a room.

    Args:
        floors: floor of every room.
        lines: nodes of each arrow, one a floor, from the top down.
    """
    top = max(floors.values())
    rows: list[list[Node]] = [[] for _ in range(top + 1)]
    for room in sorted(floors):
        rows[top - floors[room]].append((room,))
    near: dict[Node, list[Node]] = {}
    for line in lines:
        for node in line[1:-1]:
            rows[top - int(node[2])].append(node)
        for upper, lower in pairwise(line):
            near.setdefault(upper, []).append(lower)
            near.setdefault(lower, []).append(upper)
    middle: dict[Node, float] = {}
    for sweep in range(SWEEPS + 1):
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            if sweep:
                row.sort(key=lambda node: fmean([middle[other] for other in near[node]] or [middle[node]]))
            widths = [WIDTH if len(node) == 1 else LANE for node in row]
            middle |= {node: sum(widths[:x]) + (widths[x] - sum(widths)) / 2 for x, node in enumerate(row)}
    left = min(middle[node] - (WIDTH if len(node) == 1 else LANE) / 2 for row in rows for node in row)
    return {
        node: (round(middle[node] - left), HEIGHT * y + HEIGHT // 2)
        for y, row in enumerate(rows)
        for node in row
    }


def draw_rooms(arrows: set[tuple[str, str]]) -> str:
    """Return the picture; arrows that follow from others are left out.

    Raises:
        graphlib.CycleError: rooms depend on each other.
    """
    floors, drawn = find_floors(arrows)
    lines: list[list[Node]] = [
        [(room,), *((room, used, str(y)) for y in range(floors[room] - 1, floors[used], -1)), (used,)]
        for room, used in sorted(drawn)
    ]
    place = place_nodes(floors, lines)
    width = max(x for x, _ in place.values()) + WIDTH // 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT * (max(floors.values()) + 1)}" '
        'font-family="sans-serif" font-size="13" text-anchor="middle">'
    ]
    for line in lines:
        ends = [(x, y + side) for x, y in (place[node] for node in line) for side in (-14, 14)][1:-1]
        points = " ".join(f"{x},{y}" for x, y in ends)
        parts.append(f'<polyline points="{points}" fill="none" stroke="#88a"/>')
    for room in sorted(floors):
        x, y = place[room,]
        parts.append(
            f'<rect x="{x - 58}" y="{y - 14}" width="116" height="28" rx="5" fill="#eef" stroke="#447"/>'
        )
        parts.append(f'<text x="{x}" y="{y + 5}">{room}</text>')
    return "\n".join((*parts, "</svg>", ""))


if __name__ == "__main__":
    checkout = Path(__file__).resolve().parents[2]
    Path(sys.argv[1]).write_text(draw_rooms(find_arrows(checkout)))
