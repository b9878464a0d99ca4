"""Accuracy of answers that are read, counted by hand from stored readings."""

from pathlib import Path

import numpy as np
import pytest

from kvbench.eval.files.readings import ReadingSet
from kvbench.eval.text.retrieval import Retrieved, find_group, name_groups
from kvbench.forced.record import ScoredText
from tests.support.image_sets import make_readings, only, reason

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
    assert "prompts=passkey and planted_facts" in reason(
        Retrieved(), "skipped", save_readings(tmp_path, meta=False)
    )


@pytest.mark.parametrize(
    ("key", "value", "group"),
    [
        ("depth", 0, "depth_0_20"),
        ("depth", 59, "depth_40_60"),
        ("gap", 0, "gap_0_128"),
        ("gap", 9999, "gap_4096_on"),
    ],
)
def test_groups_hold_their_lower_bound(key: str, value: int, group: str) -> None:
    assert find_group(key, value) == group
    assert group in name_groups(key)
