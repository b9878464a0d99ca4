"""The page as one file with its pictures."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kvbench.dashboard import bundle
from kvbench.dashboard.page import render_bundle, write_bundle
from tests.support.browser import record_events
from tests.support.results import PSNR, made_up
from tests.support.run_folders import paint, score, write_image_runs, write_run


def read_document(page: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(page.split('id="document">')[1].split("</script>")[0])
    return document


def decode(address: str) -> np.ndarray:
    with Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))) as image:
        return np.asarray(image.convert("RGB"))


def test_small_pictures_are_stored_as_they_are(runs_dir: Path) -> None:
    document = read_document(render_bundle(runs_dir))
    pictures = document["bundle"]["pictures"]
    for run in document["runs"]:
        if run["samples"]["kind"] == "images":
            assert len(run["samples"]["picture"]) == len(run["samples"]["index"]) == 4
            brightness = 200 if run["method"] == "full" else 90
            for number in run["samples"]["picture"]:
                assert (decode(pictures[number]) == brightness).all()
        else:
            assert "picture" not in run["samples"]


def test_large_pictures_are_reduced(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    whole = Image.fromarray(noise).resize((1024, 768))
    buffer = io.BytesIO()
    whole.save(buffer, "PNG")
    write_run(tmp_path, made_up("full", 1.0, {}, run="full-0", n=1), [("a", {}, buffer.getvalue())])
    metrics = {"psnr": score(PSNR, 20.0, 1.0)}
    run = made_up("heatkv", 0.1, metrics, n=1)
    write_run(tmp_path, run, [("a", {}, buffer.getvalue())], values={"psnr-": {"psnr": [20.0]}})
    document = read_document(render_bundle(tmp_path))
    for address in document["bundle"]["pictures"]:
        pixels = decode(address)
        assert pixels.shape == (384, 512, 3)
        expected = np.asarray(whole.resize((512, 384), Image.Resampling.LANCZOS), np.float64)
        assert np.abs(pixels - expected).mean() < 6
    assert len(document["bundle"]["pictures"]) == 2  # the run's and its reference's


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
def test_a_bundle_opens_without_the_runs(browser: Any, tmp_path: Path) -> None:
    write_image_runs(tmp_path / "runs")
    path = write_bundle(tmp_path / "runs").rename(tmp_path / "mail.html")
    page = browser.new_page()
    complaints, requests = record_events(page)
    page.goto(path.as_uri())
    page.locator("#runs tbody .num").nth(5).click()
    assert page.locator("#chosen a").count() == 0
    page.keyboard.press("Escape")
    page.keyboard.press("2")
    images = page.locator("img-comparison-slider.rendered img")
    assert images.evaluate_all("all => all.map(image => image.naturalWidth)") == [8, 8]
    assert "4 of 4 samples" in page.locator("#left").inner_text()
    for view in "34":
        page.keyboard.press(view)
    page.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]
