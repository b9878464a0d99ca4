"""A metric in two files, a module and a YAML outside the program, is in every table, figure and comparison."""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import hydra
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvbench.eval.protocol.base import Evaluator
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.report.collect import collect_runs
from kvbench.report.differences import show_differences
from kvbench.report.document import write_report
from kvbench.report.figures.plots import choose_panels, trace_curves
from kvbench.report.one_run import show_run
from kvbench.report.runs_table import show_runs
from kvbench.runs import execute
from kvbench.runs.record.results import Results
from tests.support.fake_run import job_in
from tests.support.results import printed

MODULE = '''
"""How dark images are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import Weight
from kvbench.eval.protocol.base import Evaluator, Result, make_result
from kvbench.eval.protocol.intervals import jackknife
from kvbench.eval.protocol.scores import MetricSpec, Score, mean_score, with_interval


@dataclass(frozen=True)
class Darkness(Evaluator):
    """`darkness`: mean distance of pixels from `white`; `darkest`: the largest of an image."""

    white: int = 255
    name: ClassVar[str] = "darkness"
    protocol: ClassVar[str] = "uint8"
    metrics: ClassVar[Mapping[str, MetricSpec]] = {
        "darkness": MetricSpec("lower", "steps", digits=1),
        "darkness/corner": MetricSpec("lower", "steps", detail=True),
        "darkest": MetricSpec("higher", digits=3),
    }

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        values = [float(self.white - images.image(index).mean()) for index in images.indices]
        corners = [float(self.white - images.image(index)[0, 0].mean()) for index in images.indices]

        def largest(kept: list[int]) -> float:
            return max(values[i] for i in kept)

        most = largest(range(len(values)))
        scores = {
            "darkness": mean_score(values, images.clusters),
            "darkness/corner": mean_score(corners, images.clusters),
            "darkest": with_interval(Score(most, len(values)), jackknife(largest, most, images.clusters)),
        }
        return make_result(self, scores, {"index": images.indices, "darkness": values})
'''
CONFIG = "darkness:\n  _target_: a_stranger.darkness.Darkness\n  white: 250\n"
SINKS = {"swa": 0, "streaming_llm": 1}


@pytest.fixture(scope="module")
def evaluators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Evaluator]]:
    """`eval=darkness` with a module on the path and a folder on Hydra's."""
    root = tmp_path_factory.mktemp("stranger")
    for path, text in {
        "a_stranger/__init__.py": "",
        "a_stranger/darkness.py": MODULE,
        "conf/eval/darkness.yaml": CONFIG,
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    sys.path.insert(0, str(root))
    with hydra.initialize_config_module("kvbench.conf", version_base="1.3"):
        cfg = hydra.compose(
            "config", overrides=[f"hydra.searchpath=[file://{root / 'conf'}]", "eval=darkness"]
        )
    assert OmegaConf.to_container(cfg.eval) == OmegaConf.to_container(OmegaConf.create(CONFIG))
    yield {name: instantiate(node) for name, node in cfg.eval.items()}
    sys.path.remove(str(root))


@pytest.fixture(scope="module")
def runs_dir(evaluators: dict[str, Evaluator], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods at two budgets."""
    root = tmp_path_factory.mktemp("runs")
    for name, sinks in SINKS.items():
        for budget in (0.3, 0.6):
            method = StreamingLLM(sinks=sinks)
            execute.run(job_in(root, method=method, method_name=name, budget=budget, evaluators=evaluators))
    return root


@pytest.fixture(scope="module")
def runs(runs_dir: Path) -> list[Results]:
    return collect_runs(runs_dir)


def test_the_terminal_shows_it_with_its_digits_and_arrow(runs: list[Results]) -> None:
    table = printed(80, show_runs, runs)
    for name, arrow, digits in (("darkness", "↓", 1), ("darkest", "↑", 3)):
        assert f"{name} {arrow}" in table
        assert all(f" {run.metrics[name].value:.{digits}f} " in table for run in runs)
    assert "corner" not in table
    assert len(runs) == 5  # with the reference
    whole = printed(120, show_run, runs[0])
    assert "darkness/corner ↓" in whole
    assert " steps " in whole


def test_markdown_and_csv_have_it(runs_dir: Path, runs: list[Results]) -> None:
    text = write_report(runs_dir, runs).read_text()
    lines = [line.replace("*", "") for line in text.splitlines() if line.startswith("|")]
    assert lines[0].endswith("| darkness ↓ | darkest ↑ |")
    table = list(csv.DictReader((runs_dir / "report.csv").open()))
    cells = [line.strip("| ").split(" | ")[-2] for line in lines[2:]]
    for cell, row in zip(cells, table, strict=True):
        ends = (float(row[f"darkness{end}"]) for end in ("", " low", " high"))
        assert cell == "{:.1f} [{:.1f}, {:.1f}]".format(*ends)
        assert float(row["darkness/corner"]) >= 0


def test_a_figure_has_a_panel_of_it(runs: list[Results]) -> None:
    assert choose_panels(runs) == {
        "darkness": "darkness, steps (lower is better)",
        "darkest": "darkest (higher is better)",
    }
    curve = trace_curves(runs, "darkness")["swa"]
    peaks = sorted(run.memory.peak for run in runs if run.method == "swa")
    assert [point.memory for point in curve] == peaks
    assert peaks == pytest.approx([0.3, 0.6], abs=0.02)
    assert all(point.low < point.value < point.high for point in curve)


def test_paired_differences_have_it(runs_dir: Path, runs: list[Results]) -> None:
    assert "darkness ↓" in printed(160, show_differences, runs, runs_dir, "swa", runs_dir)
    lines = (runs_dir / "report-against-swa.md").read_text().splitlines()
    assert lines[2] == "| method | budget | n | darkness ↓ | darkest ↑ |"
    by_budget = {run.memory.budget_text: run for run in runs if run.method == "streaming_llm"}
    rows = [line.strip("| ").split(" | ") for line in lines[4:6]]
    assert [row[:3] for row in rows] == [["streaming_llm", budget, "10"] for budget in ("0.3", "0.6")]
    for _, budget, _, darkness, darkest in rows:
        ours = by_budget[budget]
        [theirs] = [r for r in runs if r.method == "swa" and r.memory.budget == ours.memory.budget]
        for metric, cell, digits in (("darkness", darkness, 1), ("darkest", darkest, 3)):
            difference = ours.metrics[metric].value - theirs.metrics[metric].value
            assert cell.split()[0] == f"{round(difference, digits) + 0.0:.{digits}f}"
            assert "[" in cell
