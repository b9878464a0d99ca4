"""FID on MJHQ-30K: equal to the plain distance to folders of the same images, for the whole run and by category."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from kvbench.eval.distribution.fid import FidReal
from kvbench.eval.distribution.mjhq import CATEGORIES, FidMjhq
from kvbench.eval.files.images import ImageSet
from kvbench.eval.protocol.base import evaluate
from kvbench.eval.spaces.scenes import Scenes
from kvbench.prompts import preferences
from tests.support.image_sets import FEATURES, make_noise, make_set, only, reason

SPACE = Scenes(path=str(FEATURES))
KINDS = ("people", "art")


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """Ten images of two categories, and of one that the run does not have."""
    rng = np.random.default_rng(4)
    for number, kind in enumerate((*KINDS, "food")):
        pixels = rng.integers(0, 200 + 20 * number, (10, 32, 32, 3), np.uint8)
        made = make_set(tmp_path / f"made {kind}", list(pixels)).folder / "images"
        shutil.copytree(made, tmp_path / "real" / kind)
    return tmp_path / "real"


def made(folder: Path, kinds: list[str]) -> ImageSet:
    return make_noise(folder, [{"category": kind} for kind in kinds], size=32)


def test_distances_are_those_to_folders_of_the_same_images(real: Path, tmp_path: Path) -> None:
    (tmp_path / "flat").mkdir()
    for kind in KINDS:
        for path in (real / kind).iterdir():
            shutil.copy(path, tmp_path / "flat" / f"{kind} {path.name}")
    images = made(tmp_path / "run", ["people"] * 6 + ["art"] * 5)
    result = only(FidMjhq(SPACE, str(real)), images)
    whole = only(FidReal(SPACE, str(tmp_path / "flat")), images).scores["fid_real_scenes"]
    assert result.scores["fid_mjhq_scenes"].value == pytest.approx(whole.value)
    assert result.scores["fid_mjhq_scenes"].ci95 == pytest.approx(whole.ci95)
    assert set(result.scores) == {"fid_mjhq_scenes", "fid_mjhq_scenes/people", "fid_mjhq_scenes/art"}
    for kind, rows in (("people", range(6)), ("art", range(6, 11))):
        part = make_set(tmp_path / kind, [images.image(row) for row in rows])  # the same pixels
        alone = only(FidReal(SPACE, str(real / kind)), part).scores["fid_real_scenes"]
        assert result.scores[f"fid_mjhq_scenes/{kind}"].value == pytest.approx(alone.value, rel=1e-6)
        assert result.scores[f"fid_mjhq_scenes/{kind}"].n == len(rows)
    assert result.reason == "11 samples against 20 real images"


def test_what_is_missing_is_told(real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVBENCH_WEIGHTS", str(tmp_path / "weights"))
    images = made(tmp_path / "run", ["people", "plants"])
    for folder in (None, str(tmp_path / "nowhere")):
        [result] = evaluate([FidMjhq(SPACE, folder)], images)
        assert result.status == "skipped"
        assert "mjhq30k_imgs.zip, unzip it" in str(result.reason)
    assert "plants is missing" in reason(FidMjhq(SPACE, str(real)), "failed", images)
    shutil.copytree(real, tmp_path / "weights" / "mjhq30k_imgs")
    assert only(FidMjhq(SPACE), made(tmp_path / "people", ["people"] * 2)).scores["fid_mjhq_scenes"].n == 2
    assert "prompts=mjhq30k" in reason(
        FidMjhq(SPACE, str(real)), "skipped", make_noise(tmp_path / "other", [{}, {}])
    )


def test_prompts_and_images_have_the_same_categories() -> None:
    assert preferences.CATEGORIES == CATEGORIES
