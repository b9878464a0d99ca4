"""Imports point one way: every room uses only rooms that stand below it."""

import re
from pathlib import Path

import pytest

import kvbench
from docs.generator.rooms import (
    EVERYTHING,
    RELATED,
    ROOMS,
    TASKS,
    describe,
    find_arrows,
    find_circles,
    find_file_arrows,
    find_inner_arrows,
    find_room,
    is_fenced,
    list_modules,
    read_imports,
)

ONLY_IN = {"hydra": "cli", "omegaconf": "cli", "trackio": "runs", "wandb": "runs"}


def under(name: str, prefix: str) -> bool:
    """Whether a dotted name is a prefix or lies below it."""
    return name == prefix or name.startswith(prefix + ".")


def allowed(module: str, name: str) -> bool:
    """Whether a module may import a name."""
    top = name.partition(".")[0]
    if top in ONLY_IN:
        return under(module, f"kvbench.{ONLY_IN[top]}")
    if top != "kvbench" or module == "kvbench":
        return True
    if name in {"kvbench.__version__", *(f"kvbench.{public}" for public in kvbench._PUBLIC)}:
        return False  # the root imports these from below
    if is_fenced(name) and not is_fenced(module):
        return module == TASKS
    room, used, imported = find_room(module), find_room(name), name.removeprefix("kvbench.")
    assert room is not None
    if used is None:  # no module: the name of an entry point
        return True
    own, other = (".".join(dotted.split(".")[:2]) for dotted in (module.removeprefix("kvbench."), imported))
    if room == used and room in ("methods", "models.families"):
        return (
            own == other or (own, other) in RELATED
        )  # a method knows no other: shared code and its own folder
    below = ROOMS[room]
    inner = any(under(imported, x) for x in below if "." in x)
    return used == room or used in below or below == EVERYTHING or inner


def violations(root: Path) -> list[str]:
    """Imports that point upward or sideways."""
    pairs = [(module, name) for module, path in list_modules(root) for name in read_imports(path)]
    return [f"{module} imports {name}" for module, name in pairs if not allowed(module, name)]


def test_imports_point_one_way(root: Path) -> None:
    assert violations(root) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("kernels/x.py", "from kvbench.engine.cache import KVCache"),
        ("kvbench/methods/x.py", "from kvbench.models.infinity.transformer import Infinity"),
        ("kvbench/methods/x.py", "from kvbench.methods.full import Full"),
        ("kvbench/methods/shared/x.py", "from kvbench.methods.h2o import H2O"),
        ("kvbench/models/janus/x.py", "from kvbench.models.lumina.transformer import LuminaConfig"),
        ("kvbench/cli/sweeps/x.py", 'import_module("kvbench.cli.app")'),
        ("kvbench/core/x.py", "from kvbench import __version__"),
        ("kvbench/runs/x.py", "import hydra"),
        ("kvbench/cli/tasks/x.py", "from kvbench.extras.race.task import choose"),
        ("kvbench/cli/app.py", 'import_module("kvbench.extras.share.verify.command")'),
    ],
)
def test_a_violation_is_found(tmp_path: Path, file: str, line: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(line + "\n")
    assert violations(tmp_path) != []


def test_no_module_depends_on_itself(root: Path) -> None:
    files = find_file_arrows(root)
    assert find_circles(files) == []
    for package in sorted({module.split(".")[1] for module, _ in files if module != "kvbench"}):
        assert find_circles(find_inner_arrows(package, files)) == [], package


@pytest.mark.parametrize(
    "line", ["from kvbench.cli.y import z", 'import_module("kvbench.cli.y")', 'T = {"z": "kvbench.cli.y:z"}']
)
def test_a_circle_is_found(tmp_path: Path, line: str) -> None:
    folder = tmp_path / "kvbench" / "cli"
    folder.mkdir(parents=True)
    (folder / "x.py").write_text(line + "\n")
    (folder / "y.py").write_text("from kvbench.cli.x import z\n")
    assert find_circles(find_file_arrows(tmp_path)) == [["kvbench.cli.x", "kvbench.cli.y"]]
    assert "2: x y" in describe(tmp_path)


def test_no_room_uses_one_above_it(root: Path) -> None:
    order = list(ROOMS)
    arrows = find_arrows(root)
    assert [(room, used) for room, used in arrows if order.index(used) > order.index(room)] == []


def test_the_page_on_architecture_names_every_room(root: Path) -> None:
    page = (root / "docs" / "architecture.md").read_text()
    assert [room for room in ROOMS if f"`{room}`" not in page] == []


def test_folders_that_must_not_shadow_packages_are_no_packages(root: Path) -> None:
    assert not (root / "kernels" / "__init__.py").exists()
    assert not (root / "eval" / "__init__.py").exists()


def test_files_fit_in_a_head(root: Path) -> None:
    long = {str(path): n for _, path in list_modules(root) if (n := len(path.read_text().splitlines())) > 420}
    assert long == {}


def test_no_module_holds_a_generator_of_random_numbers(root: Path) -> None:
    """What a test draws from it would depend on the tests before it."""
    held = re.compile(
        r"(?m)^\w.* = [\w.]*(?:default_rng|Generator|RandomState|Random)\([^()]*\)(\.manual_seed.*)?$"
    )
    assert held.search("import x\nRNG = torch.Generator().manual_seed(SEED)\n")
    tests = (root / "tests").rglob("*.py")
    assert [path for path in tests if held.search(path.read_text())] == [], "use the fixture `rng`"
