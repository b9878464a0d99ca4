"""Metrics of texts that are read are compared between runs: by the values of each text, or by resamples."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.core.files import hash_content
from kvbench.eval.files.kinds import READINGS
from kvbench.eval.files.readings import ReadingSet
from kvbench.eval.protocol.base import evaluate
from kvbench.eval.protocol.compare import compare_runs
from kvbench.eval.registry import build_metrics, read_metrics
from kvbench.models.outputs import ReadText
from tests.support.image_sets import write_lines

TEXTS, TOKENS = 12, 40


def write_run(folder: Path, seed: int, scale: float) -> ReadingSet:
    """Readings of random numbers; runs of all seeds have the same texts."""
    (folder / "readings").mkdir(parents=True)
    rng, lines = np.random.default_rng(seed), []
    for index in range(TEXTS):
        tokens = torch.arange(TOKENS, dtype=torch.int32)
        kl, nll, full = (torch.from_numpy(rng.gamma(1, scale, TOKENS).astype(np.float32)) for _ in range(3))
        likeliest = torch.from_numpy(rng.integers(0, 2, TOKENS).astype(np.int32))
        content = READINGS.encode(ReadText(tokens, likeliest, tokens % 2, kl, nll, full))
        path = READINGS.find(folder, index)
        path.write_bytes(content)
        lines.append({"index": index, "seed": 0, "prompt": f"text {index}", "sha256": hash_content(content)})
    write_lines(folder, lines)
    return ReadingSet(folder)


@pytest.mark.parametrize("metric", ["kl", "kl_p95", "kl_p99", "same_top1", "perplexity", "nll_change"])
def test_a_difference_has_an_interval(tmp_path: Path, metric: str) -> None:
    runs = [write_run(tmp_path / str(seed), seed, scale) for seed, scale in ((1, 0.2), (2, 0.1))]
    for run in runs:
        for result in evaluate(build_metrics(read_metrics("forced")), run):
            assert result.status == "ok", result.reason
            result.save(run.folder / "metrics")
    difference = compare_runs(runs[0].folder, runs[1].folder)[metric]
    assert difference.interval is not None
    low, high = difference.interval
    assert low < difference.value < high
    if metric.startswith("kl"):
        assert difference.value > 0


def test_a_percentile_of_kl_is_over_all_tokens_of_all_texts(tmp_path: Path) -> None:
    run = write_run(tmp_path, 3, 0.1)
    [result] = evaluate(build_metrics(read_metrics("kl")), run)
    values = np.concatenate([reading.kl for _, reading in run.readings()]).astype(float)
    assert result.scores["kl_p99"].value == pytest.approx(np.quantile(values, 0.99))
    assert result.scores["kl"].value == pytest.approx(values.mean())
