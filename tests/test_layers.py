"""The import graph is the one the architecture promises."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

# A module may import kvbench modules whose name starts with one of the entries; the longest matching key applies.
NUMBERS = ("kvbench.segments", "kvbench.budget")
METHOD_BASE = (*NUMBERS, "kvbench.methods.base")
MAY: dict[str, tuple[str, ...]] = {
    "kvbench": (),
    "kvbench.segments": (),
    "kvbench.budget": ("kvbench.segments",),
    "kvbench.config": (),
    "kvbench.memory": NUMBERS,
    "kvbench.published": ("kvbench.config",),
    "kvbench.paper_memory": (*NUMBERS, "kvbench.memory", "kvbench.methods.ams_kv", "kvbench.published"),
    "kvbench.stability": ("kvbench.attention_by_scale",),
    "kvbench.plots": ("kvbench.published", "kvbench.runs"),
    "kvbench.schedule": NUMBERS,
    "kvbench.orders": NUMBERS,
    "kvbench.attention_by_scale": METHOD_BASE,
    "kvbench.methods": (
        *METHOD_BASE, "kvbench.methods.select", "kvbench.schedule", "kvbench.orders", "kvbench.attention_by_scale",
    ),
    "kvbench.kernels": ("kvbench.kernels",),
    "kvbench.eval": ("kvbench.eval",),
    "kvbench.scenes": ("kvbench.scenes",),
    "kvbench.scenes.exact": ("kvbench.scenes", "kvbench.eval"),
    "kvbench.conf": (),
    "kvbench.view": ("kvbench.segments", "kvbench.kernels"),
    "kvbench.cache": (*METHOD_BASE, "kvbench.kernels", "kvbench.view"),
    "kvbench.models": (*NUMBERS, "kvbench.kernels", "kvbench.models", "kvbench.scenes"),
    "kvbench.prompts": ("kvbench.config", "kvbench.scenes"),
    "kvbench.prompt_sets": ("kvbench.config", "kvbench.eval", "kvbench.prompts"),
    "kvbench.provenance": (),
    "kvbench.runs": ("kvbench.config",),
    "kvbench.logger": ("kvbench.config",),
    "kvbench.scoring": (*NUMBERS, "kvbench.config", "kvbench.eval", "kvbench.memory", "kvbench.runs", "kvbench.sheet"),
    "kvbench.sheet": ("kvbench.eval",),
    "kvbench.training": (
        "kvbench.segments", "kvbench.models", "kvbench.scenes", "kvbench.training", "kvbench.eval.features",
    ),
    "kvbench.plan": (
        *METHOD_BASE, "kvbench.view", "kvbench.config", "kvbench.kernels",
        "kvbench.memory",
    ),
    "kvbench.calibration": (
        *METHOD_BASE, "kvbench.cache", "kvbench.config", "kvbench.models",
        "kvbench.prompts", "kvbench.runs",
    ),
    "kvbench.report": ("kvbench.plan", "kvbench.runs"),
    "kvbench.summary": (
        "kvbench.paper_memory", "kvbench.plots", "kvbench.published", "kvbench.report", "kvbench.runs",
        "kvbench.stability",
    ),
    "kvbench.job": (
        *METHOD_BASE, "kvbench.methods.full", "kvbench.config", "kvbench.eval", "kvbench.models", "kvbench.prompts",
    ),
    "kvbench.differences": (
        "kvbench.config", "kvbench.eval", "kvbench.published", "kvbench.report", "kvbench.runs",
    ),
    "kvbench.runner": ("kvbench",),
    "kvbench.stopwatch": ("kvbench.models.base",),
    "kvbench.trace": (),
    "kvbench.bench": (
        *METHOD_BASE, "kvbench.cache", "kvbench.job", "kvbench.memory", "kvbench.models", "kvbench.stopwatch",
    ),
    "kvbench.profiler": (
        *METHOD_BASE, "kvbench.bench", "kvbench.calibration", "kvbench.job", "kvbench.memory", "kvbench.methods.full",
        "kvbench.models", "kvbench.prompts", "kvbench.provenance", "kvbench.runner", "kvbench.runs", "kvbench.trace",
    ),
    "kvbench.profile_report": ("kvbench.job", "kvbench.memory", "kvbench.profiler"),
    "kvbench.cli": ("kvbench",),
}  # fmt: skip
NEVER: dict[str, tuple[str, ...]] = {
    "kvbench.runner": ("kvbench.cli", "kvbench.report"),
    "kvbench": ("kvbench.tests",),
}
ONLY_IN = {"hydra": "kvbench.cli", "omegaconf": "kvbench.cli", "wandb": "kvbench.logger"}


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    for folder, name in (
        ("kvbench", "kvbench"),
        ("kernels", "kvbench.kernels"),
        ("eval", "kvbench.eval"),
        ("conf", "kvbench.conf"),
    ):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            yield ".".join((name, *(part for part in parts if part != "__init__"))), path


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def violations(root: Path) -> list[str]:
    found = []
    for module, path in modules(root):
        key = max((k for k in MAY if under(module, k)), key=len)
        allowed = MAY[key]
        if module.startswith("kvbench.methods."):
            allowed = tuple(a for a in allowed if a != "kvbench.methods")
        for name in imports(path):
            if under(name, "kvbench") and name != "kvbench.__version__":
                forbidden = [
                    n for k, names in NEVER.items() if under(module, k) for n in names if under(name, n)
                ]
                if forbidden or not any(under(name, a) for a in allowed):
                    found.append(f"{module} imports {name}")
            owner = ONLY_IN.get(name.split(".")[0])
            if owner is not None and module != owner:
                found.append(f"{module} imports {name}")
    return found


def test_imports_point_one_way(root: Path) -> None:
    assert violations(root) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("kernels/x.py", "from kvbench.cache import KVCache"),
        ("eval/x.py", "import kvbench.runs"),
        ("kvbench/methods/x.py", "from kvbench.models.infinity import Infinity"),
        ("kvbench/methods/x.py", "from kvbench.methods.full import Full"),
        ("kvbench/models/x.py", "from kvbench.methods.base import Method"),
        ("kvbench/runs.py", "import hydra"),
        ("kvbench/runner.py", "from kvbench.cli import main"),
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
