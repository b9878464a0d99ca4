"""Metrics of texts that are read: against sums by hand, and compared by the values of each text, or by resamples."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvbench.eval.files.readings import ReadingSet
from kvbench.eval.protocol.compare import compare_runs
from kvbench.eval.registry import build_metrics, read_metrics
from kvbench.eval.text.forced import Kl, Perplexity, SameTop1
from kvbench.forced.record import ScoredText
from tests.support.image_sets import make_readings, only


def write_run(folder: Path, seed: int, scale: float, lengths: Sequence[int] = (40,) * 12) -> ReadingSet:
    """Readings of random numbers; runs of all seeds have the same texts."""
    rng, texts = np.random.default_rng(seed), []
    for length in lengths:
        numbers = rng.gamma(1, scale, (3, length)).astype(np.float32)
        likeliest, full = rng.integers(0, 2, (2, length)).astype(np.int32)
        texts.append(ScoredText(np.arange(length, dtype=np.int32), likeliest, full, *numbers))
    return make_readings(folder, texts)


def test_a_difference_has_an_interval(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), seed, scale) for seed, scale in ((1, 0.2), (2, 0.1))]
    for run in runs:
        for metric in build_metrics(read_metrics("forced")):
            only(metric, run).save(run.folder / "metrics")
    found = compare_runs(runs[0].folder, runs[1].folder)
    for name in ("kl", "kl_p95", "kl_p99", "same_top1", "perplexity", "nll_change"):
        low, high = found[name].interval
        assert low < found[name].value < high
        assert found[name].value > 0 or not name.startswith("kl")


def test_texts_of_unequal_length_count_alike(tmp_path: Path) -> None:
    readings = write_run(tmp_path, 0, 0.3, (2, 5, 3))
    columns = [
        (one.kl, one.likeliest == one.likeliest_full, one.nll, one.nll_full) for _, one in readings.readings()
    ]
    means = [[sum(map(float, column)) / len(column) for column in text] for text in columns]
    kl, same, nll, full = (sum(column) / 3 for column in zip(*means, strict=True))
    found = {
        name: score.value
        for metric in (Kl(), SameTop1(), Perplexity())
        for name, score in only(metric, readings).scores.items()
    }
    everything = np.concatenate([text[0] for text in columns]).astype(float)
    expected = {
        **{f"kl_p{share}": np.quantile(everything, share / 100) for share in (95, 99)},
        "kl": kl,
        "same_top1": same,
        "perplexity": math.exp(nll),
        "nll_change": nll - full,
        "perplexity_full": math.exp(full),
    }
    assert found == pytest.approx(expected, rel=1e-6)
