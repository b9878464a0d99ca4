"""Imports point one way: every room uses only rooms that stand below it."""

import runpy
import sys
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
    if (
        room == used == "methods"
    ):  # a method knows no other method: only shared code, and the files of its own folder
        return own == other
    if room == used == "models.families":
        return own == other or (own, other) in RELATED
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
        ("kvbench/methods/shared/x.py", "from kvbench.methods.h2o import H2O"),
        ("kvbench/models/x.py", "from kvbench.models.janus.transformer import JanusConfig"),
        ("kvbench/models/janus/x.py", "from kvbench.models.lumina.transformer import LuminaConfig"),
        ("kvbench/cli/sweeps/x.py", 'import_module("kvbench.cli.app")'),
        ("kvbench/models/x.py", "from kvbench.methods.shared.base import Method"),
        ("kvbench/core/x.py", "from kvbench import __version__"),
        ("kvbench/cli/x.py", "from kvbench import UserError"),
        ("kvbench/runs/x.py", "import hydra"),
        ("kvbench/cli/tasks/x.py", "from kvbench.extras.race.task import choose"),
        ("kvbench/cli/app.py", 'import_module("kvbench.extras.share.verify.command")'),
        ("kvbench/dashboard/x.py", "import kvbench.extras"),
        ("kvbench/extras/race/x.py", "from kvbench.extras.training.loop import fit"),
        ("kvbench/extras/race/x.py", "from omegaconf import OmegaConf"),
        ("kvbench/runs/x.py", "from kvbench.cli.app import main"),
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


@pytest.mark.parametrize("program", ["rooms", "ceilings"])
def test_programs_print_without_an_argument(
    root: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    runpy.run_path(str(root / "docs" / "generator" / f"{program}.py"), run_name="__main__")


def test_the_page_on_architecture_names_every_room(root: Path) -> None:
    page = (root / "docs" / "architecture.md").read_text()
    assert [room for room in ROOMS if f"`{room}`" not in page] == []


def test_folders_that_must_not_shadow_packages_are_no_packages(root: Path) -> None:
    assert not (root / "kernels" / "__init__.py").exists()
    assert not (root / "eval" / "__init__.py").exists()


def test_files_fit_in_a_head(root: Path) -> None:
    long = {str(path): n for _, path in list_modules(root) if (n := len(path.read_text().splitlines())) > 420}
    assert long == {}
