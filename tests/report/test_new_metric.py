"""A metric in two files, a module and a YAML outside the program, is in every table, figure and comparison."""

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


def test_every_table_and_figure_has_it(runs_dir: Path, runs: list[Results]) -> None:
    """Differences are of the run's and the other's own values, in the metric's digits."""
    lines = write_report(runs_dir, runs).read_text().splitlines()
    assert next(line for line in lines if line.startswith("|")).endswith("| darkness ↓ | darkest ↑ |")
    assert "darkness/corner low" in (runs_dir / "report.csv").read_text().splitlines()[0]
    assert choose_panels(runs) == {
        "darkness": "darkness, steps (lower is better)",
        "darkest": "darkest (higher is better)",
    }
    assert all(point.low < point.value < point.high for point in trace_curves(runs, "darkness")["swa"])
    assert "darkness ↓" in printed(160, show_differences, runs, runs_dir, "swa", runs_dir)
    lines = (runs_dir / "report-against-swa.md").read_text().splitlines()
    assert lines[2] == "| method | budget | n | darkness ↓ | darkest ↑ |"
    found = {(run.method, run.memory.budget_text): run for run in runs}
    for line, budget in zip(lines[4:6], ("0.3", "0.6"), strict=True):
        method, shown, count, darkness, _ = line.strip("| ").split(" | ")
        assert (method, shown, count) == ("streaming_llm", budget, "10")
        ours, theirs = (found[name, budget].metrics["darkness"].value for name in ("streaming_llm", "swa"))
        assert darkness.startswith(f"{round(ours - theirs, 1) + 0.0:.1f} [")
