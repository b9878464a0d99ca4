"""Rotary positions and published schedules: equal to the official tables."""

import gzip
import json

import numpy as np
import pytest
import torch

from kvbench.core.segments import next_scale
from kvbench.models.infinity import rope
from kvbench.models.infinity.scales import SCALES, TEMPLATES, schedule
from tests.support.places import GOLDENS

GOLDEN = GOLDENS / "infinity"
TABLES = np.load(GOLDEN / "rope.npz")
PUBLISHED = json.loads(gzip.decompress((GOLDEN / "schedules.json.gz").read_bytes()))
RATIOS = [1, 1.25, 0.8, 1.333, 0.75, 1.5, 0.666, 1.75, 0.571, 2, 0.5, 2.5, 0.4, 3, 0.333]


def test_ratios_are_the_published_ones() -> None:
    assert list(TEMPLATES) == RATIOS
    assert {float(key) for key in PUBLISHED} == set(RATIOS)


@pytest.mark.parametrize("ratio", RATIOS)
def test_positions_equal_the_official_table(ratio: float) -> None:
    sizes = TEMPLATES[ratio]
    found = torch.cat([rope.place_tokens(height, width, sizes[-1]) for height, width in sizes])
    assert np.array_equal(found.numpy(), TABLES[f"ratio_{ratio:g}"])


def test_angles_equal_the_official_table() -> None:
    segments = next_scale(TEMPLATES[1])
    rotation = rope.compute_rotations(segments, (64, 64), 128, 10_000.0, "cpu")
    assert rotation.shape == (10_521, 64)
    for found, expected in zip(
        (rotation.real, rotation.imag), torch.from_numpy(TABLES["cos_sin"]), strict=True
    ):
        torch.testing.assert_close(found[:521:8], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("ratio", list(PUBLISHED))
def test_schedules_equal_the_published_ones(ratio: str) -> None:
    for pixels, entry in PUBLISHED[ratio].items():
        assert [list(size) for size in schedule(float(ratio), pixels)] == entry["hw"]
    assert set(PUBLISHED[ratio]) == set(SCALES)


def test_an_unknown_pixel_count_or_ratio_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model.pixels=2M: must be one of 0.06M, 0.25M, 0.60M, 1M"):
        schedule(1.0, "2M")
    for aspect, ratio in ((1.02, 1), (1.49, 1.5), (0.34, 0.333), (9.0, 3), (0.1, 0.333)):
        with pytest.raises(
            ValueError, match=rf"model.aspect={aspect}: must be one of .*; {ratio} is nearest"
        ):
            schedule(aspect, "1M")
