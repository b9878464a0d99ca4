"""A run belongs to the code that drew it: an edit that can change samples makes a run of its own, others do not."""

import sys
from dataclasses import replace
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
from kvbench.runs import code, execute
from kvbench.runs.code import find_versions, identify_code, is_pinned, list_classes
from kvbench.runs.record.results import Outcome
from tests.support.fake_run import job_in


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
from kvbench.methods.streaming_llm import StreamingLLM
from study.plain.ranks import FIRST

@dataclass
class Mine(StreamingLLM):
    sinks: int = FIRST  # of a run
"""


def test_a_method_edited_between_equal_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks, mine = tmp_path / "study" / "plain" / "ranks.py", tmp_path / "study" / "mine.py"
    ranks.parent.mkdir(parents=True)
    ranks.write_text("FIRST = 1\n")
    mine.write_text(METHOD)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run() -> Outcome:
        for name in ("study.mine", "study.plain.ranks"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        method = import_module("study.mine").Mine(sinks=1)
        return execute.run(job_in(tmp_path / "runs", 2, method, method_name="mine"))

    first = run()
    mine.write_text(METHOD.replace("# of a run", "# of every run"))
    assert run() == replace(first, reused=True)
    ranks.write_text("FIRST = 1 + 0\n")
    second = run()
    assert (second.folder == first.folder, second.reused) == (False, False)
    assert f"its code differs from {first.folder.name}, which stays: study.plain.ranks" in caplog.text
