"""The full cache's score beside accuracies, and the mark of a task that it fails, wherever a run is shown."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.dashboard.document import make_document
from kvbench.eval.text.answers import AccuracyChange, ExactAnswerChange
from kvbench.eval.text.full_cache import CHANGES, TASKS
from kvbench.eval.text.string_match import StringMatchAllChange, StringMatchPartChange
from kvbench.report.code_notes import list_notes
from kvbench.report.full_scores import explain_mark, find_full, is_failed
from kvbench.report.runs_table import make_rows
from kvbench.runs.record.results import Results
from tests.report.test_texts import SHARE, asked
from tests.support.places import ROOT
from tests.support.results import made_up
from tests.support.run_folders import write_run

COLUMN = "retrieved, full cache"


def answered(method: str, accuracy: float, change: float | None) -> Results:
    right = replace(SHARE, value=accuracy, evaluator="accuracy")
    metrics = {"accuracy": right, "accuracy_change": replace(right, value=change, needs_reference=True)}
    return made_up(method, 1.0 if method == "full" else 0.25, metrics, "qwen3_8b")


FAILING = [asked("full", 0.05, 0.05), asked("h2o", 0.0, 0.05), asked("tova", 0.05, 0.05)]
SOLVED = [asked("full", 0.9, 0.9), asked("h2o", 0.2, 0.9)]


def column(runs: list[Results], name: str = COLUMN) -> dict[str, object]:
    return {str(row["method"]): row.get(name) for row in make_rows(runs)}


def test_every_accuracy_stands_beside_the_full_caches() -> None:
    assert column(FAILING) == dict.fromkeys(("full", "h2o", "tova"), "0.050‡")
    assert column(SOLVED) == dict.fromkeys(("full", "h2o"), "0.900")
    names = list(make_rows(SOLVED)[0])
    assert names.index(COLUMN) == names.index("retrieved") + 1
    runs = [answered("full", 0.3, None), answered("rkv", 0.1, -0.2)]
    assert column(runs, "accuracy, full cache") == dict.fromkeys(("full", "rkv"), "0.300")
    assert not list_notes(runs, ())  # a hard set of problems is no failed task
    other = made_up("swa", 0.1, {"accuracy": replace(SHARE, value=0.5)})
    assert find_full(other, "accuracy") is None  # without its change
    assert "accuracy, full cache" not in make_rows([other])[0]


@pytest.mark.parametrize(("full", "failed"), [(0.0, True), (0.499, True), (0.5, False), (1.0, False)])
def test_a_task_is_failed_below_the_metrics_constant(full: float, failed: bool) -> None:
    run = asked("h2o", 0.0, full)
    assert is_failed(run, "retrieved") == failed
    assert (list_notes([run], ()) != []) == failed
    assert "below 0.5" in explain_mark(*TASKS)
    assert "fewer than half of the answers (`SOLVED`, 0.5)" in (ROOT / "docs" / "metrics.md").read_text(
        "utf-8"
    )


def test_the_page_has_the_score_and_the_mark(tmp_path: Path) -> None:
    for run in (FAILING[1], replace(SOLVED[1], run="h2o-solved")):
        write_run(tmp_path, run, [])
    page = make_document(tmp_path)
    assert page["failed"] == explain_mark(*TASKS)

    def read(run: Mapping[str, Mapping[str, Mapping[str, int]]]) -> tuple[object, object]:
        own = run["metrics"]["retrieved"]
        return own["full"], own.get("failed")

    assert sorted(map(read, page["runs"])) == [(0.05, True), (0.9, None)]


def test_changes_are_the_metrics_of_answers() -> None:
    changes = (AccuracyChange, ExactAnswerChange, StringMatchAllChange, StringMatchPartChange)
    pairs = {kind.__mro__[2].name: kind.name for kind in changes}
    assert pairs == CHANGES
