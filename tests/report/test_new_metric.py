"""A metric in two files, a module and a YAML outside the program, is in every table, figure and comparison."""

import re
from pathlib import Path

import hydra
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.report.collect import collect_runs
from kvbench.report.differences import show_differences
from kvbench.report.document import write_report
from kvbench.report.figures.plots import choose_panels, trace_curves
from kvbench.report.one_run import show_run
from kvbench.report.runs_table import show_runs
from kvbench.runs import execute
from tests.support.fake_run import job_in
from tests.support.results import printed

MODULE = '''
"""How dark images are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvbench.eval.files.images import ImageSet
from kvbench.eval.protocol.base import Evaluator, Result, make_result
from kvbench.eval.protocol.scores import MetricSpec, mean_score


@dataclass(frozen=True)
class Darkness(Evaluator):
    """`darkness`: mean distance of pixels from `white`."""

    white: int = 255
    name: ClassVar[str] = "darkness"
    protocol: ClassVar[str] = "uint8"
    metrics: ClassVar[Mapping[str, MetricSpec]] = {"darkness": MetricSpec("lower", "steps", digits=1)}

    def run(self, images: ImageSet, reference: ImageSet | None, device: str) -> Result:
        values = [float(self.white - images.image(index).mean()) for index in images.indices]
        scores = {"darkness": mean_score(values, images.clusters)}
        return make_result(self, scores, {"index": images.indices, "darkness": values})
'''
CONFIG = "darkness:\n  _target_: a_stranger.darkness.Darkness\n  white: 250\n"


def test_every_table_and_figure_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two methods at two budgets with `eval=darkness`, a module on the path and a folder on Hydra's."""
    for path, text in {
        "a_stranger/__init__.py": "",
        "a_stranger/darkness.py": MODULE,
        "conf/eval/darkness.yaml": CONFIG,
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [f"hydra.searchpath=[file://{tmp_path / 'conf'}]", "eval=darkness"]
    with hydra.initialize_config_module("kvbench.conf", version_base="1.3"):
        cfg = hydra.compose("config", overrides=words)
    assert OmegaConf.to_container(cfg.eval) == OmegaConf.to_container(OmegaConf.create(CONFIG))
    evaluators = {name: instantiate(node) for name, node in cfg.eval.items()}
    for name, sinks in (("swa", 0), ("streaming_llm", 1)):
        for budget in (0.3, 0.6):
            method = StreamingLLM(sinks=sinks)
            execute.run(
                job_in(
                    tmp_path / "runs", method=method, method_name=name, budget=budget, evaluators=evaluators
                )
            )
    runs_dir = tmp_path / "runs"
    runs = collect_runs(runs_dir)
    table = printed(80, show_runs, runs)
    assert "darkness ↓" in table
    assert all(f" {run.metrics['darkness'].value:.1f}" in table for run in runs)
    assert re.search("darkness ↓.* steps ", printed(120, show_run, runs[0]))
    lines = write_report(runs_dir, runs).read_text().splitlines()
    assert next(line for line in lines if line.startswith("|")).endswith("| darkness ↓ |")
    assert choose_panels(runs) == {"darkness": "darkness, steps (lower is better)"}
    assert all(point.low < point.value < point.high for point in trace_curves(runs, "darkness")["swa"])
    assert "darkness ↓" in printed(160, show_differences, runs, runs_dir, "swa", runs_dir)
    lines = (runs_dir / "report-against-swa.md").read_text().splitlines()
    assert lines[2] == "| method | budget | n | darkness ↓ |"
    found = {(run.method, run.memory.budget_text): run for run in runs}
    for line, budget in zip(lines[4:6], ("0.3", "0.6"), strict=True):
        ours, theirs = (found[name, budget].metrics["darkness"].value for name in ("streaming_llm", "swa"))
        assert line.startswith(f"| streaming_llm | {budget} | 10 | {round(ours - theirs, 1) + 0.0:.1f} [")
