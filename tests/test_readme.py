"""The README's recipe for a new method is a whole, working method, and its commands name keys that exist."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from kvbench.budget import Budget
from kvbench.cli import check_arguments
from kvbench.methods.base import Method
from kvbench.plan import cached_after
from kvbench.segments import ModelSpec, next_scale

SPEC = ModelSpec("small", 3, 2, 8, next_scale([(1, 1), (2, 2), (3, 3), (5, 5), (6, 6)]))


def block(root: Path, language: str, after: str) -> str:
    text = (root / "README.md").read_text()
    found = re.search(rf"```{language}\n(.*?)```", text[text.index(after) :], re.DOTALL)
    assert found is not None
    return found[1]


def test_the_new_method_keeps_to_any_budget_in_under_50_lines(root: Path) -> None:
    code, config = (
        block(root, "python", "## Add a method"),
        yaml.safe_load(block(root, "yaml", "## Add a method")),
    )
    assert len(code.splitlines()) < 50
    namespace: dict[str, object] = {"__name__": "kvbench.methods.newest"}
    exec(compile(code, "README.md", "exec"), namespace)
    factory = namespace[config.pop("_target_").rsplit(".", 1)[1]]
    assert isinstance(factory, type)
    for budget in (0.05, 0.3, 1):
        method = factory(**config)
        assert isinstance(method, Method)
        capacity = Budget.parse(budget, SPEC)
        method.prepare(SPEC, capacity)
        held = cached_after(SPEC, method)
        assert held.max() <= capacity.capacity
        assert held.max() > 0.5 * capacity.capacity


def commands(root: Path) -> list[str]:
    text = (root / "README.md").read_text().replace("\\\n", " ")
    return [line.split("#")[0].strip() for line in text.splitlines() if line.startswith("python run.py")]


@pytest.mark.parametrize("command", commands(Path(__file__).parent.parent))
def test_commands_compose(command: str) -> None:
    assert check_arguments(shlex.split(command)[2:]) is None
