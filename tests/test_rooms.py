"""Imports point one way: every room uses only rooms that stand below it."""

from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from docs.generator.rooms import draw_rooms, find_arrows, find_room, list_modules, read_imports

EVERYTHING = ("kvbench",)
CONTRACT = ("methods.base", "methods.capabilities", "methods.view")
"""The contract between methods and the engine."""
ENGINE = ("engine", "engine.cache", "engine.coding", "engine.packed")
RUNS = ("runs", "runs.generate", "runs.identity", "runs.record", "runs.score")
ROOMS: dict[str, tuple[str, ...]] = {
    "core": (),
    "conf": (),
    "kernels": (),
    "puzzles": (),
    "eval": ("core",),
    "scenes": ("eval",),
    "methods": ("core",),
    "engine.coding": ("core", "kernels", *CONTRACT),
    "engine": ("core", "engine.coding", "kernels", *CONTRACT),
    "engine.packed": ("core", "engine", "engine.coding", "kernels", *CONTRACT),
    "engine.cache": ("core", "engine", "engine.coding", "engine.packed", "kernels", *CONTRACT),
    "models": ("core", "kernels", "scenes"),
    "prompts": ("core", "eval", "scenes", "puzzles"),
    "training": ("core", "eval", "models", "scenes", "puzzles"),
    "plan": ("core", *ENGINE, *CONTRACT, "models.base"),
    "runs.identity": ("core",),
    "runs.record": ("core", "engine", "eval", "kernels", "models", "runs.identity"),
    "runs": (
        "core",
        *ENGINE,
        "eval",
        *CONTRACT,
        "methods.full",
        "models",
        "prompts",
        "runs.identity",
        "runs.record",
    ),
    "runs.generate": ("core", *ENGINE, "eval", *CONTRACT, "models", "runs", "runs.record"),
    "runs.score": ("core", "eval", "runs", "runs.record"),
    "runs.execute": ("core", *RUNS),
    "profile": ("core", *ENGINE, "kernels", *CONTRACT, "methods.full", "models", *RUNS),
    "policy": ("core", "engine", *CONTRACT, "runs", "runs.generate"),
    "data": ("core", "runs.record"),
    "report": ("core", "data", "engine", "eval", "methods", "plan", "runs.generate", "runs.record"),
    "dashboard": ("core", "eval", "report", "runs.generate", "runs.record"),
    "cli": EVERYTHING,
}
"""Rooms that each room may import beside itself, lowest first; `kvbench/plan.py` is a room of one file."""
SHARED = (
    "base",
    "capabilities",
    "capacities",
    "grouped",
    "layer_shares",
    "output_norms",
    "redundancy",
    "scored",
    "select",
    "view",
    "wrapper",
)
"""Modules of `methods` that every method may use."""
ONLY_IN = {"hydra": "cli", "omegaconf": "cli", "wandb": "runs"}


def under(name: str, prefix: str) -> bool:
    """Whether a dotted name is a prefix or lies below it."""
    return name == prefix or name.startswith(prefix + ".")


def allowed(module: str, name: str) -> bool:
    """Whether a module may import a name."""
    top = name.partition(".")[0]
    if top in ONLY_IN:
        return under(module, f"kvbench.{ONLY_IN[top]}")
    if top != "kvbench" or name == "kvbench.__version__" or module == "kvbench":
        return True
    room, used, imported = find_room(module), find_room(name), name.removeprefix("kvbench.")
    assert room is not None
    if room == "methods" and under(imported, "methods"):
        # A method knows no other method: only what all share, and the files of its own folder.
        folder, shared = ".".join(module.split(".")[1:3]), imported.split(".")[1] in SHARED
        return shared or under(imported, folder)
    below = ROOMS[room]
    return (
        used == room
        or used in below
        or below == EVERYTHING
        or any(under(imported, x) for x in below if "." in x)
    )


def violations(root: Path) -> list[str]:
    """Imports that point upward or sideways."""
    return [
        f"{module} imports {name}"
        for module, path in list_modules(root)
        for name in read_imports(path)
        if not allowed(module, name)
    ]


def test_imports_point_one_way(root: Path) -> None:
    assert violations(root) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("kernels/x.py", "from kvbench.engine.cache import KVCache"),
        ("eval/x.py", "import kvbench.runs.record.folder"),
        ("kvbench/methods/x.py", "from kvbench.models.infinity.transformer import Infinity"),
        ("kvbench/methods/x.py", "from kvbench.methods.full import Full"),
        ("kvbench/methods/heatkv/x.py", "from kvbench.methods.h2o import H2O"),
        ("kvbench/models/x.py", "from kvbench.methods.shared.base import Method"),
        ("kvbench/runs/x.py", "import hydra"),
        ("kvbench/runs/x.py", "from kvbench.cli.app import main"),
    ],
)
def test_a_violation_is_found(tmp_path: Path, file: str, line: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(line + "\n")
    assert violations(tmp_path) != []


def test_no_module_depends_on_itself(root: Path) -> None:
    known = dict(list_modules(root))
    graph = {
        module: {used for name in read_imports(path) if (used := find_module(name, known))} - {module}
        for module, path in known.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def find_module(name: str, known: Mapping[str, Path]) -> str | None:
    """Return the module that an imported name is or lies in; None outside kvbench and for its root."""
    while name not in known and name:
        name = name.rpartition(".")[0]
    return name if name != "kvbench" else None


def test_no_room_uses_one_above_it(root: Path) -> None:
    order = list(ROOMS)
    arrows = find_arrows(root)
    assert [(room, used) for room, used in arrows if order.index(used) > order.index(room)] == []


def test_the_picture_of_rooms_is_current(root: Path) -> None:
    picture = (root / "docs" / "images" / "rooms.svg").read_text()
    assert picture == draw_rooms(find_arrows(root)), "make rooms draws it anew"


def test_the_page_on_architecture_names_every_room(root: Path) -> None:
    page = (root / "docs" / "architecture.md").read_text()
    assert [room for room in ROOMS if f"`{room}`" not in page] == []


def test_folders_that_must_not_shadow_packages_are_no_packages(root: Path) -> None:
    assert not (root / "kernels" / "__init__.py").exists()
    assert not (root / "eval" / "__init__.py").exists()


def test_files_fit_in_a_head(root: Path) -> None:
    long = {str(path): n for _, path in list_modules(root) if (n := len(path.read_text().splitlines())) > 420}
    assert long == {}
