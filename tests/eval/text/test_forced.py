"""Metrics of texts that are read: against sums by hand, and compared by values of each text, or by resamples."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvbench.eval.files.readings import ReadingSet
from kvbench.eval.protocol.compare import compare_runs
from kvbench.eval.registry import build_metrics, read_metrics
from kvbench.eval.text.forced import Kl, Perplexity, SameTop1
from kvbench.eval.text.retrieval import Retrieved, find_group, name_groups
from kvbench.forced.record import ScoredText
from tests.support.image_sets import make_readings, only, reason


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


ANSWER = [4, 8, 2]
READ = [
    # likeliest under the method, under the full cache, depth, gap
    ([4, 8, 2], [4, 8, 2], 10, 900), ([4, 8, 3], [4, 8, 2], 19, 800), ([1, 8, 2], [4, 8, 2], 20, 700),
    ([4, 8, 2], [4, 8, 1], 100, 127), ([4, 8, 2], [4, 8, 2], 80, 128),
]  # fmt: skip


def save_readings(folder: Path, meta: bool = True) -> ReadingSet:
    texts, numbers = [], np.zeros(3, np.float32)
    for ours, full, _, _ in READ:
        columns = (np.array(row, np.int32) for row in (ANSWER, ours, full))
        texts.append(ScoredText(*columns, numbers, numbers, numbers))
    places = [{"depth": depth, "gap": gap, "answer": "482"} for *_, depth, gap in READ]
    return make_readings(folder, texts, places if meta else None)


def test_an_answer_counts_if_all_its_tokens_are_the_likeliest(tmp_path: Path) -> None:
    result = only(Retrieved(), save_readings(tmp_path))
    values = {name: score.value for name, score in result.scores.items()}
    assert values == {
        "retrieved": pytest.approx(3 / 5), "retrieved_full": pytest.approx(4 / 5),
        "retrieved/depth_0_20": 0.5, "retrieved/depth_20_40": 0, "retrieved/depth_80_100": 1,
        "retrieved/gap_0_128": 1, "retrieved/gap_128_256": 1, "retrieved/gap_512_1024": pytest.approx(1 / 3),
    }  # fmt: skip
    assert result.scores["retrieved/gap_512_1024"].n == 3
    assert result.samples is not None
    assert result.samples["gap"] == [900, 800, 700, 127, 128]
    assert set(values) <= set(Retrieved().metrics)


def test_texts_without_a_place_are_skipped(tmp_path: Path) -> None:
    readings = save_readings(tmp_path, meta=False)
    assert "prompts=passkey and planted_facts" in reason(Retrieved(), "skipped", readings)


def test_groups_hold_their_lower_bound() -> None:
    for key, value, group in (
        ("depth", 59, "depth_40_60"),
        ("gap", 0, "gap_0_128"),
        ("gap", 9999, "gap_4096_on"),
    ):
        assert find_group(key, value) == group
        assert group in name_groups(key)
