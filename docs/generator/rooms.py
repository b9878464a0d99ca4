"""Packages of the code and their imports, read from the sources.

`make rooms` prints them, with arrows that point upward and circles of files, and draws docs/images/rooms.svg
and rooms-dark.svg, for pages on black.
A room is a package, or a file that the table `ROOMS` names.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

FOLDERS = (
    ("kvbench", "kvbench"),
    ("kernels", "kvbench.kernels"),
    ("eval", "kvbench.eval"),
    ("conf", "kvbench.conf"),
)
"""Folders of a checkout and the packages that they are."""
EVERYTHING = ("kvbench",)
CONTRACT = tuple(
    f"methods.shared.{name}" for name in ("base", "calibration", "hook_results", "precision", "uses", "view")
)
"""The contract between methods and the engine."""
ENGINE = ("engine", "engine.cache", "engine.coding", "engine.packed", "engine.recording")
JOB = ("cli.config", "cli.console", "cli.tasks.job")
RECORD = ("runs.record", "runs.run_hash")
RUNS = ("runs", "runs.generate", *RECORD, "runs.score")
REPORT = ("report", "report.figures", "report.papers")
MODELS = ("models", "models.base", "models.files", "models.parts")
FORCED = ("forced", "forced.decoding", "forced.given")
BASES = ("core", "engine.recording", "kernels", "models.files")
"""Rooms that the base classes of models import."""
ROOMS: Mapping[str, tuple[str, ...]] = {
    "core": (),
    "conf": (),
    "kernels": (),
    "puzzles": (),
    "forced": ("core",),
    "eval": ("core", "forced"),
    "scenes": ("core", "eval"),
    "methods.shared": ("core",),
    "methods": ("core", "methods.shared"),
    "engine.coding": ("core", "kernels", *CONTRACT),
    "engine.recording": (),
    "engine": ("core", "engine.coding", "engine.recording", "kernels", *CONTRACT),
    "engine.packed": ("core", "engine", "engine.coding", "kernels", *CONTRACT),
    "engine.cache": (
        "core",
        "engine",
        "engine.coding",
        "engine.packed",
        "engine.recording",
        "kernels",
        *CONTRACT,
    ),
    "models.files": ("core",),
    "models.base": BASES,
    "models.parts": (*BASES, "models.base"),
    "forced.decoding": ("core", "forced", "models.base", "models.files"),
    "models": ("core", "forced.decoding", "kernels", "models.base", "models.files", "models.parts"),
    "models.families": ("core", "forced.decoding", "kernels", *MODELS, "scenes"),
    "forced.given": ("core", "forced", "forced.decoding", "models", "models.base"),
    "prompts": ("core", "eval", "forced", "scenes", "puzzles"),
    "plan": ("core", *ENGINE, *CONTRACT, "models.base"),
    "runs.run_hash": ("core",),
    "runs.record": ("core", "engine", "eval", "kernels", "models.base", "runs.run_hash"),
    "runs": ("core", *ENGINE, "eval", *FORCED, *CONTRACT, "methods.full", *MODELS, "prompts", *RECORD),
    "runs.generate": ("core", *ENGINE, "eval", *FORCED, *CONTRACT, *MODELS, "runs", *RECORD),
    "runs.score": ("core", "eval", "runs", "runs.record"),
    "runs.execute": ("core", "eval", *RUNS),
    "profile": ("core", *ENGINE, "kernels", *CONTRACT, "methods.full", *MODELS, *RUNS, "runs.execute"),
    "policy": ("core", "engine", *CONTRACT, "runs", "runs.generate"),
    "data": ("core", "runs.record"),
    "report": (
        "core",
        "data",
        "engine",
        "eval",
        "forced",
        "plan",
        "runs.code",
        "runs.generate",
        "runs.record",
    ),
    "report.figures": ("core", "engine", "eval", "report", "runs.generate", "runs.record"),
    "report.papers": ("core", "engine", "methods", "report", "report.figures", "runs.record"),
    "dashboard": ("conf", "core", "data", "eval", "forced", *REPORT, "runs.generate", "runs.record"),
    "cli.console": ("core",),
    "cli.config": ("cli.console", "conf", "core", "report.papers", "runs", "runs.record"),
    "cli.sweeps": ("cli.config", "cli.console", "core", "runs.record"),
    "cli.tasks": EVERYTHING,
    "cli.workers": ("cli.config", "cli.console", "cli.sweeps", "cli.tasks", "core", *RUNS, "runs.execute"),
    "cli.dispatch": EVERYTHING,
    "cli.submit": EVERYTHING,
    "cli": EVERYTHING,
    "extras.training": ("core", "eval", *MODELS, "models.families", "scenes", "puzzles"),
    "extras.race": (*JOB, "core", "eval", *CONTRACT, "report", "report.figures", "runs", "runs.execute"),
    "extras.share": (
        *JOB,
        "conf",
        "core",
        "dashboard",
        "data",
        *ENGINE,
        "eval",
        "forced",
        *CONTRACT,
        *MODELS,
        "models.families",
        "report",
        *RUNS,
        "scenes",
    ),
}
"""Rooms that each room may import beside itself, lowest first; a dotted name may also be a module or package in one."""
FENCED = "extras"
"""Package that nothing outside it imports, whatever `ROOMS` says."""
TASKS = "kvbench.cli.tasks.table"
"""Module that names functions of `FENCED`, which are imported when their task is run."""
FAMILIES = ("infinity", "var", "llamagen", "janus", "lumina", "emu3", "llama", "qwen3")
"""Packages of `kvbench.models` that are one room, `models.families`; `RELATED` says which may import another."""
RELATED = {("models.janus", "models.llamagen")}
"""Family that uses another one's image tokenizer."""
BESIDE = {
    "__main__": "cli",
    "forced.passes": "forced.decoding",
    "models.noise": "models.base",
    "models.outputs": "models.base",
    "runs.partial": "runs.execute",
    "version": "core",
}
"""Files that belong to another file's room."""
WIDTH, LANE, HEIGHT = 136, 26, 70
"""Pixels: width of a room, width of a line that passes between rooms, height of a floor."""
SWEEPS = 24
"""Rounds that order each floor by the places of its neighbours, so that few lines cross."""

NAMED = re.compile(r"kvbench\.[\w.]+(:\w+)?")
"""Strings that name a module or something in one."""

Node = tuple[str, ...]
"""A room (its name), or the place where a line passes a floor (both of its rooms and the floor)."""
Arrows = set[tuple[str, str]]
"""Pairs of rooms or files, the first of which imports the second."""


class Colours(NamedTuple):
    """Colours of a picture: lines, and the inside, the frame and the name of a room."""

    arrow: str
    box: str
    edge: str
    text: str


LIGHT = Colours("#88a", "#eef", "#447", "#000")
DARK = Colours("#667", "#223", "#88b", "#ddd")


def list_modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and file of every module of a checkout."""
    for folder, name in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            yield ".".join((name, *(part for part in parts if part != "__init__"))), path


@cache
def read_imports(path: Path) -> tuple[str, ...]:
    """Return the full names that a file imports, also by strings such as `"kvbench.cli.app"` or `"kvbench.x.y:main"`.

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
        elif isinstance(node, ast.Constant) and NAMED.fullmatch(str(node.value)):
            names.append(str(node.value).replace(":", "."))
    return tuple(names)


def find_room(name: str) -> str | None:
    """Return the room of a module or of a name in one; None outside kvbench, for its root and for no room."""
    top, *parts = name.split(".")
    if top != "kvbench" or not parts:
        return None
    if parts[0] == "models" and parts[1:2] and parts[1] in FAMILIES:
        return "models.families"
    inner = ".".join(parts[:2])
    return BESIDE.get(inner) or next((room for room in (inner, parts[0]) if room in ROOMS), None)


def is_fenced(name: str) -> bool:
    """Return whether a name is of `FENCED` or in it."""
    return f"{name}.".startswith(f"kvbench.{FENCED}.")


def find_arrows(root: Path) -> Arrows:
    """Return pairs of rooms, the first of which imports the second; tasks of `FENCED` are imported later, by name."""
    return {
        (room, used)
        for module, path in list_modules(root)
        for name in read_imports(path)
        if (room := find_room(module)) and (used := find_room(name)) and used != room
        if not (module == TASKS and is_fenced(name))
    }


def find_module(name: str, known: Mapping[str, Path]) -> str | None:
    """Return the module that an imported name is or is located in; None outside kvbench and for its root."""
    while name not in known and name:
        name = name.rpartition(".")[0]
    return name if name != "kvbench" else None


def find_file_arrows(root: Path) -> Arrows:
    """Return pairs of modules, the first of which imports the second."""
    known = dict(list_modules(root))
    return {
        (module, used)
        for module, path in known.items()
        for name in read_imports(path)
        if (used := find_module(name, known)) and used != module
    }


def find_circles(arrows: Arrows) -> list[list[str]]:
    """Return the groups of nodes that import each other, directly or through others, each sorted."""
    uses: dict[str, set[str]] = {}
    for user, used in arrows:
        uses.setdefault(user, set()).add(used)
    below: dict[str, set[str]] = {}
    for start in uses:
        seen: set[str] = set()
        stack = [start]
        while stack:
            new = uses.get(stack.pop(), set()) - seen
            seen |= new
            stack += new
        below[start] = seen
    looped = [(start, seen) for start, seen in below.items() if start in seen]
    circles = {tuple(sorted(node for node in seen if start in below.get(node, ()))) for start, seen in looped}
    return [list(circle) for circle in sorted(circles)]


def find_inner_arrows(package: str, arrows: Arrows) -> Arrows:
    """Return the arrows between the files and packages that a package holds directly."""

    def child(module: str) -> str | None:
        rest = module.removeprefix(f"kvbench.{package}.")
        return None if rest == module else rest.partition(".")[0]

    pairs = {(child(user), child(used)) for user, used in arrows}
    return {(user, used) for user, used in pairs if user and used and user != used}


def describe(root: Path) -> str:
    """Return the text that `make rooms` prints: each package, arrows, upward arrows, circles."""
    files, between = find_file_arrows(root), find_arrows(root)
    modules = [name for name, _ in list_modules(root)]
    packages = sorted({name.split(".")[1] for name in modules if name.count(".") > 1})
    lines = [f"{'package':<10} {'entries':>7} {'floors':>6} {'arrows':>6}  circles"]
    for package in packages:
        entries = {name.split(".")[2] for name in modules if name.startswith(f"kvbench.{package}.")}
        arrows = find_inner_arrows(package, files)
        circles = find_circles(arrows)
        floors = "-" if circles else str(1 + max(find_floors(arrows)[0].values(), default=0))
        said = "; ".join(f"{len(circle)}: {' '.join(circle)}" for circle in circles) or "none"
        lines.append(f"{package:<10} {len(entries):>7} {floors:>6} {len(arrows):>6}  {said}")
    order = list(ROOMS)
    upward = sorted(f"{user} -> {used}" for user, used in between if order.index(used) > order.index(user))
    rooms = len({room for pair in between for room in pair})
    lines.append(
        f"{rooms} rooms, {len(between)} arrows, {len(upward)} upward{': ' * bool(upward)}{', '.join(upward)}"
    )
    circles = find_circles(files)
    lines.append(f"circles of files: {'; '.join(' '.join(circle) for circle in circles) or 'none'}")
    return "\n".join(lines)


def find_floors(arrows: Arrows) -> tuple[dict[str, int], Arrows]:
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


def draw_rooms(arrows: Arrows, colours: Colours) -> str:
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
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colours.arrow}"/>')
    for room in sorted(floors):
        x, y = place[room,]
        parts.append(
            f'<rect x="{x - 58}" y="{y - 14}" width="116" height="28" rx="5" '
            f'fill="{colours.box}" stroke="{colours.edge}"/>'
        )
        parts.append(f'<text x="{x}" y="{y + 5}" fill="{colours.text}">{room}</text>')
    return "\n".join((*parts, "</svg>", ""))


def draw_pictures(root: Path) -> dict[Path, str]:
    """Return the pictures of a checkout's rooms by their files."""
    folder, arrows = root / "docs" / "images", find_arrows(root)
    return {
        folder / "rooms.svg": draw_rooms(arrows, LIGHT),
        folder / "rooms-dark.svg": draw_rooms(arrows, DARK),
    }


if __name__ == "__main__":
    checkout = Path(__file__).resolve().parents[2]
    print(describe(checkout))
    if sys.argv[1:] == ["--draw"]:
        for file, picture in draw_pictures(checkout).items():
            file.write_text(picture)
