"""The page as one file with its pictures."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kvbench.dashboard import bundle
from kvbench.dashboard.page import render_bundle, write_bundle
from tests.support.results import PSNR, made_up
from tests.support.run_folders import paint, score, write_image_runs, write_run


def read_document(page: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(page.split('id="document">')[1].split("</script>")[0])
    return document


def decode(address: str) -> np.ndarray:
    with Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))) as image:
        return np.asarray(image.convert("RGB"))


def test_large_pictures_are_reduced_and_small_ones_stored_as_they_are(tmp_path: Path, runs_dir: Path) -> None:
    document = read_document(render_bundle(runs_dir))
    pictures = document["bundle"]["pictures"]
    for run in document["runs"]:
        if run["samples"]["kind"] == "images":
            assert len(run["samples"]["picture"]) == len(run["samples"]["index"]) == 4
            brightness = 200 if run["method"] == "full" else 90
            assert all((decode(pictures[number]) == brightness).all() for number in run["samples"]["picture"])
        else:
            assert "picture" not in run["samples"]
    noise = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    whole = Image.fromarray(noise).resize((1024, 768))
    buffer = io.BytesIO()
    whole.save(buffer, "PNG")
    metrics = {"psnr": score(PSNR, 20.0, 1.0)}
    for run in (made_up("full", 1.0, {}, run="full-0", n=1), made_up("heatkv", 0.1, metrics, n=1)):
        values = {"psnr-": {"psnr": [20.0]}} if run.metrics else None
        write_run(tmp_path, run, [("a", {}, buffer.getvalue())], values=values)
    pictures = read_document(render_bundle(tmp_path))["bundle"]["pictures"]
    assert len(pictures) == 2  # the run's and its reference's
    expected = np.asarray(whole.resize((512, 384), Image.Resampling.LANCZOS), np.float64)
    for address in pictures:
        assert decode(address).shape == (384, 512, 3)
        assert np.abs(decode(address) - expected).mean() < 6


def test_the_worst_samples_stay_where_space_ends(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven runs of one kind: the sample with the lowest PSNR or highest LPIPS first, under all of them."""
    monkeypatch.setattr(bundle, "MAX_BYTES", 2 * len(paint(200)) + 6 * len(paint(90)))
    document = read_document(render_bundle(runs_dir))
    runs = [run for run in document["runs"] if run["samples"]["kind"] == "images"]
    assert sorted(len(run["samples"]["index"]) for run in runs) == [1] * 6 + [2]
    assert {run["samples"]["index"][0] for run in runs} == {1}
    assert [run["method"] for run in runs if len(run["samples"]["index"]) == 2] == ["full"]
    assert not document["bundle"]["complete"]


@pytest.mark.nightly
def test_a_bundle_opens_without_the_runs(open_page: Callable[..., Any], tmp_path: Path) -> None:
    write_image_runs(tmp_path / "runs")
    page = open_page(write_bundle(tmp_path / "runs").rename(tmp_path / "mail.html").as_uri())
    page.locator("#runs tbody .num").nth(5).click()
    assert page.locator("#chosen a").count() == 0
    page.keyboard.press("Escape")
    page.keyboard.press("2")
    images = page.locator("img-comparison-slider.rendered img")
    assert images.evaluate_all("all => all.map(image => image.naturalWidth)") == [8, 8]
    assert "4 of 4 samples" in page.locator("#left").inner_text()
    for view in "34":
        page.keyboard.press(view)
