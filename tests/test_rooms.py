"""Imports point one way: every room uses only rooms that stand below it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

EVERYTHING = ("kvbench",)
CONTRACT = ("methods.base", "methods.capabilities", "methods.view")
"""The contract between methods and the engine."""
ROOMS: dict[str, tuple[str, ...]] = {
    "core": (),
    "conf": (),
    "kernels": (),
    "eval": ("core",),
    "scenes": ("eval",),
    "puzzles": (),
    "methods": ("core",),
    "engine.coding": ("core", "kernels"),
    "engine.packed": ("core", "engine", "kernels", *CONTRACT),
    "engine": ("core", "engine.coding", "engine.packed", "kernels", *CONTRACT),
    "models": ("core", "kernels", "scenes"),
    "prompts": ("core", "eval", "scenes", "puzzles"),
    "training": ("core", "eval", "models", "scenes", "puzzles"),
    "plan": ("core", "engine", *CONTRACT, "models.base"),
    "runs": ("core", "engine", "eval", *CONTRACT, "methods.full", "models", "prompts"),
    "profile": ("core", "engine", *CONTRACT, "methods.full", "models", "prompts", "runs"),
    "data": ("core", "eval", "runs"),
    "report": ("core", "data", "engine", "eval", "methods", "plan", "runs"),
    "dashboard": ("core", "eval", "report", "runs"),
    "cli": EVERYTHING,
}
"""What a room may import beside itself; `kvbench/plan.py` is a room of one file."""
SHARED = ("base", "capabilities", "capacities", "redundancy", "scored", "select", "view")
"""Modules of `methods` that every method may use."""
ONLY_IN = {"hydra": "cli", "omegaconf": "cli", "wandb": "runs"}
FOLDERS = (
    ("kvbench", "kvbench"),
    ("kernels", "kvbench.kernels"),
    ("eval", "kvbench.eval"),
    ("conf", "kvbench.conf"),
)


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Names and files of all modules."""
    for folder, name in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            yield ".".join((name, *(part for part in parts if part != "__init__"))), path


def imports(path: Path) -> Iterator[str]:
    """Everything that a file imports, by full name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


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
    room, imported = module.split(".")[1], name.removeprefix("kvbench.")
    if room == "methods" and under(imported, "methods"):
        # A method knows no other method: only what all share, and the files of its own folder.
        folder, shared = ".".join(module.split(".")[1:3]), imported.split(".")[1] in SHARED
        return shared or under(imported, folder)
    return under(imported, room) or any(
        entry in EVERYTHING or under(imported, entry) for entry in ROOMS[room]
    )


def violations(root: Path) -> list[str]:
    """Imports that point upward or sideways."""
    return [
        f"{module} imports {name}"
        for module, path in modules(root)
        for name in imports(path)
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
        ("kvbench/models/x.py", "from kvbench.methods.base import Method"),
        ("kvbench/runs/x.py", "import hydra"),
        ("kvbench/runs/x.py", "from kvbench.cli.app import main"),
    ],
)
def test_a_violation_is_found(tmp_path: Path, file: str, line: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(line + "\n")
    assert violations(tmp_path) != []


def test_no_module_depends_on_itself(root: Path) -> None:
    known = dict(modules(root))
    graph = {
        module: {k for name in imports(path) for k in known if under(name, k) and k != "kvbench"}
        for module, path in known.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"cycle: {' -> '.join((*trail, module))}"
        if module not in done:
            for other in graph[module] - {module}:
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_folders_that_must_not_shadow_packages_are_no_packages(root: Path) -> None:
    assert not (root / "kernels" / "__init__.py").exists()
    assert not (root / "eval" / "__init__.py").exists()


def test_files_fit_in_a_head(root: Path) -> None:
    long = {str(path): n for _, path in modules(root) if (n := len(path.read_text().splitlines())) > 420}
    assert long == {}
