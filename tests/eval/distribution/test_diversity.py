"""Diversity at a fixed prompt: stored values of the authors' program, known answers, groups and intervals."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvbench.eval.distribution.diversity import Diversity, mean_distance, vendi_score
from kvbench.eval.networks import to_unit
from kvbench.eval.protocol.compare import compare_runs
from kvbench.eval.protocol.intervals import bootstrap
from kvbench.eval.spaces.scenes import SceneFeatures, Scenes
from tests.support.image_sets import FEATURES, GOLDEN, make_noise, make_set, only, reason

pytestmark = pytest.mark.usefixtures("offline")
STORED = json.loads((GOLDEN / "newer_metrics.json").read_text())["vendi"]
SPACE = Scenes(path=str(FEATURES))
NAMES = ["diversity[scenes]", "vendi[scenes,n=2]"]


@pytest.mark.parametrize("case", STORED, ids=lambda case: case["kind"])
def test_both_equal_the_stored_values(case: dict) -> None:
    features = np.array(case["features"])
    assert mean_distance(features) == pytest.approx(case["mean_pairwise_cosine_distance"], abs=1e-9)
    assert vendi_score(features) == pytest.approx(case["q"]["1"], abs=1e-9)


def test_prompts_are_measured_one_by_one_and_resampled_whole(tmp_path: Path) -> None:
    """Two prompts, twice two images of the one and two and a half times two of the other, in mixed order."""
    prompts = ["a", "b", "b", "a", "b", "a", "b", "a", "b"]
    images = make_noise(tmp_path / "run", [{}] * 9, prompts)
    result = only(Diversity(SPACE), images)
    assert list(result.scores) == ["diversity[scenes]", "vendi[scenes,n=4]"]
    pairs = only(
        Diversity(SPACE), make_noise(tmp_path / "pairs", [{}] * 8, ["a", "a", "b", "b", "c", "d", "d", "c"])
    )
    assert list(pairs.scores) == NAMES
    network = SceneFeatures.load(FEATURES)
    features = [network.features(to_unit(images.image(i)[None])).detach().numpy()[0] for i in range(9)]
    expected = []
    for group in ([0, 3, 5, 7], [1, 2, 4, 6]):
        cosines = [
            features[i] @ features[j] / np.linalg.norm(features[i]) / np.linalg.norm(features[j])
            for i in group
            for j in group
            if i < j
        ]
        expected.append(1 - float(np.mean(cosines)))
    assert result.samples["index"] == [0, 1]
    assert result.samples["diversity[scenes]"] == pytest.approx(expected, abs=1e-6)
    interval = bootstrap(result.samples["diversity[scenes]"], ["a", "b"]).clip(0, 2)
    assert result.scores["diversity[scenes]"].ci95 == (interval.low, interval.high)
    assert result.reason == "1 images are left over from groups of 4"


def test_equal_images_are_one_and_a_run_equals_itself(tmp_path: Path) -> None:
    noise = make_noise(tmp_path / "noise", [{}] * 4, ["a", "a", "b", "b"])
    equal = make_set(tmp_path / "equal", [noise.image(0)] * 4, ["a", "a", "b", "b"])
    result = only(Diversity(SPACE), equal)
    assert [score.value for score in result.scores.values()] == pytest.approx([0, 1], abs=1e-9)
    only(Diversity(SPACE), noise).save(noise.folder / "metrics")
    for difference in compare_runs(noise.folder, noise.folder).values():
        assert (difference.value, difference.interval, difference.n) == (0, (0, 0), 2)


def test_a_single_image_of_a_prompt_is_refused(tmp_path: Path) -> None:
    images = make_noise(tmp_path / "run", [{}] * 3, ["a", "a", "b"])
    assert "prompts.per_prompt=4" in reason(Diversity(SPACE), "skipped", images)
    with pytest.raises(ValueError, match="per_prompt=1: must be a whole number of at least 2"):
        Diversity(SPACE, per_prompt=1)
