"""A run belongs to the code that drew it: an edit that can change samples makes a run of its own, others do not."""

from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from kvbench.core.config import ConfigError
from kvbench.methods.chunkkv import ChunkKV
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.runs import code
from kvbench.runs.code import find_versions, identify_code, is_pinned, list_classes
from tests.support.command_line import run_python
from tests.support.edits import EDITS
from tests.support.places import ROOT


def test_pinned_classes_leave_hashes_as_they_are() -> None:
    assert identify_code("method", [Full, H2O]) is None


def test_another_revision_or_a_subclass_counts_by_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(H2O):
        pass

    class Other(StreamingLLM):
        pass

    mine, other = identify_code("method", [Mine]), identify_code("method", [Other])
    assert None not in (mine, other)
    assert mine != other
    monkeypatch.setattr(H2O, "revision", 99)
    assert not is_pinned(H2O)
    assert identify_code("method", [H2O]) is not None


def test_versions_of_what_its_file_imports_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(H2O):
        pass

    before = identify_code("method", [Mine])
    assert identify_code("method", [Mine]) == before
    monkeypatch.setattr(code, "version", lambda name: f"{name} of tomorrow")
    assert identify_code("method", [Mine]) != before  # this file imports pytest
    assert identify_code("method", [H2O]) is None


def test_classes_of_inner_fields_count() -> None:
    class Mine(H2O):
        pass

    classes = [list_classes(ChunkKV(base=base), {}) for base in (H2O(), Mine())]
    assert [identify_code("method", one) is None for one in classes] == [True, False]


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
    assert code.find_versions(read.libraries) == {"foreign": "1"}


def test_a_class_without_source_is_refused_by_its_key() -> None:
    made = type("Made", (Full,), {"__module__": "nowhere"})
    with pytest.raises(
        ConfigError, match=r"^method: nowhere\.Made: has no Python source; define the class in"
    ):
        identify_code("method", [made])


def test_packages_that_kvbench_does_not_require_count_by_version() -> None:
    assert [*find_versions({"torch", "json", "kvbench", "pytest", "missing"})] == ["pytest"]


@pytest.mark.slow
def test_a_method_edited_twelve_times() -> None:
    done = run_python(ROOT, "-m", "tests.support.edits")
    *effects, killed = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    states = {edit.what: "made anew" if edit.counts else "found" for edit in EDITS}
    assert [line[:43].split("  ")[0] for line in effects] == [*states]
    assert all(states[line[:32].strip()] in line for line in effects), done.stdout
    assert len({line.split()[-1] for line in effects}) == 1 + sum(edit.counts for edit in EDITS)
    assert "which stays: study.mine\n" in done.stdout
    before, after, kept = killed.split()[-3:]
    assert before != after
    assert int(kept) >= 2
