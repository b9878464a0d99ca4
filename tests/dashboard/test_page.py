"""The page in a browser: what is sorted, filtered, pointed at, compared and opened."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.core.files import name_sample
from kvbench.dashboard.page import write_dashboard
from kvbench.eval.protocol.scores import Metric
from kvbench.eval.text.full_cache import TASKS
from kvbench.report.full_scores import explain_mark
from tests.support.results import LPIPS, made_up
from tests.support.run_folders import HOSTILE, PROMPTS, WORTH, score, with_bytes, write_image_runs, write_run

pytestmark = pytest.mark.nightly
ABSENT = "\N{EN DASH}"


def psnr(method: str, budget: float) -> str:
    return f"{WORTH[method] + 10 * (budget - 0.1):.2f}"


def column(page: Any, title: str) -> list[str]:
    """The texts of a column of the leaderboard, without intervals."""
    heads = [head.strip(" ▾▴") for head in page.locator("#runs thead th").all_inner_texts()]
    cells = page.locator(f"#runs tbody td:nth-child({heads.index(title) + 1})").all_inner_texts()
    return [cell.split("±")[0].strip() for cell in cells]


def sort_by(page: Any, key: str) -> None:
    page.click(f'#runs thead [data-sort="{key}"]')


def test_the_table_is_sorted_filtered_and_grouped(page: Any) -> None:
    wanted = sorted((psnr(method, budget) for method in WORTH for budget in (0.1, 0.2)), reverse=True)
    assert column(page, "psnr ↑") == [*wanted, ABSENT]
    sort_by(page, "psnr")
    assert column(page, "psnr ↑") == [*wanted[::-1], ABSENT]
    sort_by(page, "lpips")
    values = column(page, "lpips ↓")
    assert values == [*sorted(values[:-1]), ABSENT]
    assert page.locator("#runs thead [aria-sort]").get_attribute("aria-sort") == "ascending"
    sort_by(page, "label")
    assert column(page, "method") == sorted(column(page, "method"))
    page.select_option("#group", "budget")
    assert page.locator("#runs tr.heading").count() == 3
    page.select_option("#group", "")
    points = page.locator("#pareto .hit")
    assert (page.locator("#runs tbody tr").count(), points.count()) == (7, 6)
    page.click('#methods [data-label="random"]')
    assert (page.locator("#runs tbody tr").count(), points.count()) == (5, 4)
    page.fill("#search", "heatkv 20")
    assert column(page, "psnr ↑") == [psnr("heatkv", 0.2)]
    assert points.count() == 1
    page.click("#reset")
    assert page.locator("#runs tbody tr").count() == 9
    page.select_option("#model", "reasoner_tiny")
    assert set(column(page, "method")) == {"full", "rkv"}
    page.select_option("#budget", "25 %")
    assert page.locator("#count").inner_text() == "2 of 9"


def test_plot_and_table_point_at_each_other(page: Any) -> None:
    sort_by(page, "psnr")  # the worst first
    row = page.locator("#runs tbody tr").first
    number = row.get_attribute("data-run")
    point = page.locator(f'#pareto .hit[data-run="{number}"]')
    point.hover()
    assert "hover" in row.get_attribute("class")
    assert "random, 10 %" in page.locator("#reading").inner_text()
    row.locator("td").first.hover()
    on = page.locator("#pareto .mark.on")
    assert {mark.get_attribute("data-run") for mark in on.all()} == {number}
    point.focus()
    page.keyboard.press("Enter")
    assert "chosen" in row.get_attribute("class")
    page.keyboard.press("Escape")
    assert "chosen" not in row.get_attribute("class")
    front = page.locator("#pareto text.mark")
    assert front.all_text_contents() == [
        "heatkv",
        "heatkv",
    ]  # of each budget the best, the larger one is better
    page.select_option("#quality", "lpips")
    page.click('#methods [data-label="heatkv"]')
    assert front.all_text_contents() == ["streaming_llm", "streaming_llm"]


def test_a_chosen_row_has_its_folder(page: Any) -> None:
    page.locator("#runs tbody .num", has_text=psnr("heatkv", 0.2)).click()
    told = page.locator("#chosen").inner_text()
    assert "c0ffee" in told
    assert "infinity_tiny/heatkv-0.2-0123456789" in told
    address = page.locator("#chosen a", has_text="results.json").get_attribute("href")
    assert address == "infinity_tiny/heatkv-0.2-0123456789/results.json"
    page.locator("#chosen button", has_text="Samples").click()
    assert page.locator("#ours").evaluate("one => one.selectedOptions[0].text").startswith("heatkv, 20 %")
    page.keyboard.press("Escape")
    assert page.locator("#chosen").inner_text() == ""


def test_samples_are_compared_worst_first_under_a_slider(page: Any) -> None:
    page.keyboard.press("2")
    prompt = page.locator("#prompt")
    assert page.locator("#order button > span:nth-of-type(2)").all_inner_texts() == [
        PROMPTS[i] for i in (1, 3, 2, 0)
    ]
    assert prompt.inner_text() == HOSTILE
    slider = page.locator("img-comparison-slider.rendered")
    assert slider.locator("img").evaluate_all("all => all.map(image => image.naturalWidth)") == [8, 8]
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert prompt.inner_text() == HOSTILE  # the slider has the arrows while it is in focus
    page.keyboard.press("j")
    assert prompt.inner_text() == "a cyan cross"
    page.locator("#next").focus()
    page.keyboard.press("ArrowLeft")
    assert prompt.inner_text() == HOSTILE
    page.select_option("#worst", "lpips")
    assert prompt.inner_text() == "two blue circles"


def test_texts_stand_side_by_side_and_are_filtered(page: Any) -> None:
    page.keyboard.press("2")
    page.select_option("#ours", label="rkv, 25 %, 0.25")
    assert page.locator("#view mark").all_inner_texts() == ["4\nanswer: 7", "5\nanswer: 8"]
    assert page.locator("#view .badge").all_inner_texts() == ["right", "wrong"]
    assert "Right answer: 7" in page.locator("#view").inner_text()
    page.keyboard.press("j")
    assert page.locator("#view mark").count() == 0
    page.select_option("#judged", "lost")
    assert page.locator("#order li").count() == 1
    page.select_option("#judged", "right")
    assert page.locator("#prompt").inner_text() == "sum 1"
    page.select_option("#judged", "won")
    assert "No sample passes" in page.locator("#view").inner_text()
    page.select_option("#judged", "")
    page.fill("#phrase", "then 5")
    assert page.locator("#order li").count() == 1
    assert page.locator("#prompt").inner_text() == "sum 0"


def test_what_was_kept_is_told_cell_by_cell_and_published_numbers_stand_beside(page: Any) -> None:
    page.keyboard.press("3")
    maps = page.locator("#maps canvas")
    assert maps.count() == 2
    box = maps.nth(1).bounding_box()
    page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 0.25 * box["height"])
    assert page.locator("#cell").inner_text() == "25.0 % kept: layer 0, KV head 1, source 2x2 of 4 tokens"
    maps.nth(1).focus()
    page.keyboard.press("ArrowDown")
    assert page.locator("#cell").inner_text().startswith("12.5 % kept: layer 1, KV head 1")
    page.keyboard.press("4")
    page.select_option("#paper", "heatkv_table1")
    row = page.locator("#beside tbody tr", has_text="heatkv").first.inner_text().split()
    assert {"28.43", "27.44", psnr("heatkv", 0.2), "12.35"} <= set(row)  # MiB as the paper counts them
    assert "The models differ" in page.locator("#paperNote").inner_text()


def test_runs_that_are_not_finished_are_listed(page: Any) -> None:
    told = page.locator("#progress").inner_text()
    for part in (
        "incomplete sweeps: 1, unfinished runs: 1, failed runs: 1, damaged runs or datasets: 1",
        "1 of 4 jobs finished, 1 running or killed, 1 failed, 1 pending",
        "budget=9: too large",
        "2 of 8 samples; running",
        "failed: out of memory",
        "swa-0.1",
    ):
        assert part in told
    page.locator("#unfailed").check()
    told = page.locator("#progress").inner_text()
    assert "2 of 8 samples; running" in told
    assert not {"swa-0.1", "failed: out of memory", "budget=9"} & {*told.replace(",", "\n").splitlines()}


def test_a_link_holds_the_whole_view(page: Any) -> None:
    page.click('#methods [data-label="random"]')
    page.select_option("#quality", "lpips")
    page.click(".menu summary")
    page.locator('[data-column="peak_mib"]').check()
    page.locator('[data-column="psnr"]').uncheck()
    page.click("#count")
    sort_by(page, "lpips")
    page.locator("#runs tbody tr").first.click()
    page.wait_for_function("() => location.hash.includes('run=')")
    seen = [page.locator(part).inner_text() for part in ("#runs", "#reading", "#methods")]
    page.reload()
    assert [page.locator(part).inner_text() for part in ("#runs", "#reading", "#methods")] == seen
    assert ("peak MiB" in seen[0], "psnr" in seen[0]) == (True, False)
    page.keyboard.press("2")
    page.select_option("#theirs", "budget")
    page.keyboard.press("j")
    page.wait_for_function("() => location.hash.includes('sample=')")
    prompt = page.locator("#prompt").inner_text()
    page.reload()
    assert page.locator("#prompt").inner_text() == prompt
    assert page.locator(".grid figure").count() == 3
    page.click("#tabs [data-view=leaderboard]")
    page.click("#reset")
    page.keyboard.press("2")
    page.select_option("#theirs", "all")
    page.select_option("#worst", "psnr")
    captions = page.locator(".grid figcaption").all_inner_texts()
    assert (len(captions), captions[0].strip()) == (7, "full")
    assert any(f"psnr {float(psnr('heatkv', 0.2)) - 4:.2f}" in caption for caption in captions)


def test_images_of_a_large_run_and_runs_of_a_sweep_are_found(
    open_page: Callable[..., Any], tmp_path: Path
) -> None:
    runs = write_image_runs(tmp_path)
    for lines in tmp_path.rglob("*.jsonl"):
        lines.write_text(lines.read_text().replace('"index": 3', '"index": 1731'))
    for image in list(tmp_path.rglob("000003.png")):
        place = image.parent / name_sample(1731, ".png")
        place.parent.mkdir()
        image.rename(place)
    for name, own in (("main", runs[1:3]), ("", runs[3:4]), ("begun", [])):
        sweep = tmp_path / "sweeps" / f"abc{name}"
        sweep.mkdir(parents=True)
        (sweep / "sweep.json").write_text(
            json.dumps([[f"seed={place}"] for place in range(max(len(own), 1))])
        )
        for place, run in enumerate(own):
            entry = {"outcome": "finished", "folder": f"elsewhere/{run.model}/{run.run}"}
            (sweep / f"job-{place:05}.json").write_text(json.dumps(entry))
        if own and name:
            (sweep / "name.txt").write_text(f"{name}\n")
    page = open_page(write_dashboard(tmp_path).as_uri())
    assert "0 of 1 jobs finished, 1 pending" in page.locator("#progress").inner_text()
    assert page.locator("#sweep option").all_inner_texts() == ["all", "abc", "main"]
    page.select_option("#sweep", "main")
    assert sorted(column(page, "budget")) == ["10 %", "100 %", "20 %"]
    assert set(column(page, "method")) == {"full", runs[1].method}
    page.select_option("#sweep", "abc")
    assert page.locator("#count").inner_text() == "2 of 7"
    page.keyboard.press("2")
    page.keyboard.press("j")
    assert page.locator("#prompt").inner_text() == PROMPTS[3]
    images = "document.querySelectorAll('img-comparison-slider.rendered img')"
    page.wait_for_function(f"[...{images}].map((image) => image.naturalWidth).join() === '8,8'")


def test_values_and_marks_are_the_reports(open_page: Callable[..., Any], tmp_path: Path) -> None:
    """Runs without records are not averaged; times without some samples and failed tasks are marked."""
    share = Metric(0.35, "higher", evaluator="retrieved", protocol="forced", digits=3, n=8)
    metrics = {"retrieved_full": replace(share, value=0.45, detail=True), "lpips": score(LPIPS, 0.5, 0.1)}
    for others, found in ((0, 0.35), (1, 0.25), (56, 0.25)):
        own = {**metrics, "retrieved": score(share, found, 0.1)}
        run = made_up("random", 0.1, own, run=f"random-{others}", config={"seed": others})
        latency = replace(run.latency, samples=40, others=others, seconds_per_image=1.0 + others)
        write_run(tmp_path, replace(run, memory=with_bytes(run.memory, 0.1), latency=latency), [])
    page = open_page(write_dashboard(tmp_path).as_uri())
    assert "lpips ↓ 0.500" in page.locator("#same").inner_text()
    assert sorted(column(page, "s / sample")) == ["1.000", "2.000~", "57.000~"]
    cell = page.locator("#runs tbody .num", has_text="0.350").first
    assert cell.inner_text() == "0.350±0.100, full cache 0.450‡"
    assert explain_mark(*TASKS) in page.locator("#meaning").inner_text()
