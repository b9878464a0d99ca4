"""A run belongs to the code that drew it: an edit that can change samples makes a run of its own, others do not."""

from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from kvbench.core.budget import Budget
from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec, next_scale
from kvbench.methods.chunkkv import ChunkKV
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.runs import code
from kvbench.runs.code import find_versions, identify_code, is_pinned, list_classes
from tests.support.command_line import run_program


class Mine(H2O):
    """A method of a user."""


def test_pinned_classes_leave_hashes_as_they_are_and_others_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(StreamingLLM):
        pass

    assert identify_code("method", [Full, H2O]) is None
    mine, other = identify_code("method", [Mine]), identify_code("method", [Other])
    assert None not in (mine, other)
    assert mine != other
    classes = [list_classes(ChunkKV(base=base), {}) for base in (H2O(), Mine())]
    assert [identify_code("method", one) is None for one in classes] == [True, False]
    assert identify_code("method", [Mine]) == mine
    with monkeypatch.context() as patch:
        patch.setattr(code, "version", lambda name: f"{name} of tomorrow")
        assert identify_code("method", [Mine]) != mine  # this file imports pytest
        assert identify_code("method", [H2O]) is None
    monkeypatch.setattr(H2O, "revision", 99)
    assert not is_pinned(H2O)
    assert identify_code("method", [H2O]) is not None


def test_what_a_method_prepares_adds_no_class() -> None:
    spec, method = ModelSpec("small", 1, 1, 8, next_scale([(1, 1), (2, 2), (3, 3)])), H2O()
    before = list_classes(method, {})
    method.prepare(spec, Budget.parse(0.5, spec))
    assert list_classes(method, {}) == before == (H2O,)


def test_a_distribution_counts_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In site-packages the files of its own distribution are read; another one counts by its version."""
    site = tmp_path / "site-packages"
    texts = {
        "mine.py": "import beside\nimport foreign\n\n\nclass Mine:\n    pass\n",
        "beside.py": "SIGN = 1\n",
        "foreign.py": "SIGN = 1\n",
        "own-1.dist-info/METADATA": "Name: own\nVersion: 1\n",
        "own-1.dist-info/top_level.txt": "mine\nbeside\n",
        "foreign-1.dist-info/METADATA": "Name: foreign\nVersion: 1\n",
        "foreign-1.dist-info/top_level.txt": "foreign\n",
    }
    for name, text in texts.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(code, "_find_distributions", packages_distributions)
    read = code.read_class(import_module("mine").Mine)
    assert [*read.files] == ["beside", "mine"]
    assert find_versions(read.libraries) == {"foreign": "1"}
    assert [*find_versions({"torch", "json", "kvbench", "pytest", "missing"})] == ["pytest"]


def test_a_class_without_source_is_refused_by_its_key() -> None:
    made = type("Made", (Full,), {"__module__": "nowhere"})
    with pytest.raises(ConfigError, match=r"^method: nowhere\.Made: has no Python source; define the class"):
        identify_code("method", [made])


METHOD = """
from dataclasses import dataclass
from typing import ClassVar

import torch
from kvbench.methods.shared.base import Method
from study.plain.ranks import rank


@dataclass
class Mine(Method):
    static: ClassVar[bool] = True

    def keep(self, view):
        ranks = rank(view.position)  # the newest first
        ranks[view.position == 0] = 10**6
        best = ranks.topk(min(self.budget.head_tokens, ranks.shape[-1]), -1).indices
        return torch.zeros_like(ranks, dtype=torch.bool).scatter(-1, best, True)
"""
FILES = {
    "mine.py": METHOD, "plain/ranks.py": "def rank(position):\n    return position * 37 % 101\n",
    "__init__.py": "", "conf/__init__.py": "", "conf/method/mine.yaml": "_target_: study.mine.Mine\n",
}  # fmt: skip
WORDS = ("method=mine", "budget=0.2", "prompts.count=2", "hydra.searchpath=[pkg://study.conf]")


@pytest.mark.slow
def test_a_method_edited_between_equal_commands(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / "study" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def edit(name: str, old: str, new: str) -> None:
        path = tmp_path / "study" / name
        path.write_text(path.read_text().replace(old, new))

    def run() -> tuple[str, str]:
        done = run_program(tmp_path, *WORDS)
        assert done.returncode == 0, done.stderr
        [line] = [line for line in done.stdout.splitlines() if "/mine-" in line]
        return Path(line.split()[-1]).name, done.stdout + done.stderr

    first, _ = run()
    edit("mine.py", "# the newest first", "# the largest first")
    assert run()[0] == first
    edit("plain/ranks.py", "% 101", "% 11")
    second, told = run()
    assert second != first
    assert f"its code differs from {first}, which stays: study.plain.ranks" in told
