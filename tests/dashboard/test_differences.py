"""Differences and means of the page are the report's."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.dashboard.page import write_dashboard
from kvbench.eval.protocol.compare import compare_runs
from kvbench.eval.protocol.crossed import cross_interval
from kvbench.eval.protocol.scores import Metric, MetricSpec, Score, share_score
from kvbench.report.collect import collect_runs
from kvbench.report.seeds import Combined, combine_seeds, compare_seeds, name_count
from kvbench.report.tables import choose_style, format_cell
from kvbench.runs.record.results import Results
from tests.support.results import made_up
from tests.support.run_folders import with_bytes, write_run

SPECS = {
    "psnr": MetricSpec("higher", "dB", 2),
    "lpips": MetricSpec("lower"),
    "geneval[scenes]": MetricSpec("higher", digits=3, strata="tag"),
    "exact_answer": MetricSpec("higher", digits=3),
    "vqascore": MetricSpec("higher", digits=3),
}
ANSWERS = ("geneval[scenes]", "exact_answer")
"""Metrics of right and wrong answers."""
METHODS = ("heatkv", "random", "snapkv")
BUDGETS = (0.1, 0.2)
PROMPTS = [f"prompt {index // 2}" for index in range(14)]
TAGS = [*"aaaabbbbbbcccc"]


def draw(seed: int, method: str, budget: float) -> dict[str, list[float | None]]:
    """Values per sample; the last PSNR is of an image equal to its reference; `vqascore` differs by almost all."""
    own = np.random.default_rng([seed, METHODS.index(method), int(100 * budget)])
    shared = np.random.default_rng(seed).normal(size=len(PROMPTS))
    psnr = 20 + 10 * budget + METHODS.index(method) + 3 * shared + own.normal(size=len(PROMPTS))
    return {
        "psnr": [*psnr.tolist()[:-1], None if budget > 0.1 else 40.0],
        "lpips": (0.3 - 0.02 * psnr / 3).tolist(),
        "geneval[scenes]": (own.random(len(PROMPTS)) < 0.6).astype(float).tolist(),
        "exact_answer": [1.0] * len(PROMPTS),
        "vqascore": [0.3, *[0.0] * 13] if method == "random" else [1.0] * 14,
    }


def average(name: str, values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    if SPECS[name].strata is None:
        return float(np.mean(known))
    groups: dict[str, list[float]] = {}
    for tag, value in zip(TAGS, known, strict=True):
        groups.setdefault(tag, []).append(value)
    return float(np.mean([np.mean(own) for own in groups.values()]))


def write_seeds(runs_dir: Path) -> list[Results]:
    """Three methods at two budgets and two seeds, with their references."""
    runs = []
    for seed in (0, 1):
        config = {"model": {"name": "infinity_tiny"}, "seed": seed}
        full = made_up("full", 1.0, {}, run=f"full-{seed}", n=len(PROMPTS), config=config)
        write_run(runs_dir, full, [(prompt, {}, b"") for prompt in PROMPTS])
        runs.append(full)
        runs += [
            write_one(runs_dir, seed, method, budget, config) for method in METHODS for budget in BUDGETS
        ]
    for path in runs_dir.rglob("samples.jsonl"):
        seed = int(json.loads((path.parent / "results.json").read_text())["config"]["seed"])
        path.write_text(path.read_text().replace('"seed": 0', f'"seed": {seed}'))
    return runs


def write_one(runs_dir: Path, seed: int, method: str, budget: float, config: dict[str, object]) -> Results:
    columns = draw(seed, method, budget)
    known = {name: [one for one in values if one is not None] for name, values in columns.items()}
    scores = {
        name: share_score(values) if name in ANSWERS else Score(float(np.mean(values)), len(values))
        for name, values in known.items()
    }
    metrics = {
        name: Metric(
            average(name, values),
            SPECS[name].better,
            n=len(PROMPTS),
            ci=scores[name].ci,
            evaluator=name,
            digits=SPECS[name].digits,
        )
        for name, values in columns.items()
    }
    run = made_up(
        method,
        budget,
        metrics,
        run=f"{method}-{budget}-{seed}",
        n=len(PROMPTS),
        config=config | {"budget": budget},
        reference=f"full-{seed}",
    )
    run = replace(run, memory=with_bytes(run.memory, budget))
    values = {f"{name}-": {name: column, "tag": TAGS} for name, column in columns.items()}
    folder = write_run(runs_dir, run, [(prompt, {}, b"") for prompt in PROMPTS], values=values)
    for name, spec in SPECS.items():
        whole = {name: {**asdict(scores[name]), **asdict(spec)}}
        record = {"evaluator": name, "protocol": "", "scores": whole}
        (folder / "metrics" / f"{name}-.json").write_text(json.dumps(record))
    return run


def show(metric: Metric) -> str:
    """A difference as the page writes it."""
    assert metric.value is not None
    digits = metric.digits
    text = f"{metric.value:+.{digits}f}" if round(metric.value, digits) else f"{0:.{digits}f}"
    ends = "" if metric.interval is None else " [{:.{d}f}, {:.{d}f}]".format(*metric.interval, d=digits)
    return (text + ends).replace("-", "\N{MINUS SIGN}")


@pytest.fixture(scope="module")
def seeds_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two seeds."""
    folder = tmp_path_factory.mktemp("seeds")
    write_seeds(folder)
    return folder


@pytest.fixture(scope="module")
def address(seeds_dir: Path) -> str:
    """The page of two seeds."""
    return write_dashboard(seeds_dir).as_uri()


def read_rows(page: Any) -> dict[tuple[str, str], dict[str, str]]:
    """Texts of the table by method and seed, and budget."""
    heads = [head.strip(" ▾▴↑↓") for head in page.locator("#runs thead th").all_inner_texts()]
    rows = [
        dict(
            zip(heads, (cell.replace("[", " [") for cell in row.locator("td").all_inner_texts()), strict=True)
        )
        for row in page.locator("#runs tbody tr").all()
    ]
    return {(" ".join(row["method"].split()), row["budget"]): row for row in rows}


def is_bold(page: Any, text: str) -> bool:
    return page.locator("#runs tbody .num", has_text=text.replace(" [", "[")).first.locator("b").count() == 1


@pytest.mark.slow
def test_differences_of_one_seed_are_the_reports(page: Any, seeds_dir: Path) -> None:
    page.select_option("#seeds", "each")
    page.locator("#details").evaluate("box => { box.checked = true; }")
    page.select_option("#differ", "random")
    rows = read_rows(page)
    seen = set()
    for seed in (0, 1):
        for method in ("heatkv", "snapkv"):
            for budget in BUDGETS:
                folders = [
                    seeds_dir / "infinity_tiny" / f"{one}-{budget}-{seed}" for one in (method, "random")
                ]
                row = rows[f"{method}seed {seed}", f"{100 * budget:.0f} %"]
                for name, metric in compare_runs(*folders).items():
                    assert row[name].replace("base", "") == show(metric), (folders, name)
                    low, high = metric.interval or (0, 0)
                    better = low > 0 if metric.better == "higher" else high < 0
                    assert is_bold(page, row[name]) == better
                    seen.add(better)
    assert seen == {True, False}
    assert rows["heatkvseed 0", "10 %"]["vqascore"].endswith(", 1.000]")  # cut: a share cannot change by more
    assert rows["randomseed 0", "10 %"]["psnr"] == "base"


@pytest.mark.nightly
def test_rows_are_means_over_seeds_unless_single_ones_are_asked_for(page: Any, seeds_dir: Path) -> None:
    runs = collect_runs(seeds_dir)
    means = {(run.method, run.memory.budget): run for run in combine_seeds(runs, seeds_dir)}
    rows = read_rows(page)
    assert len(rows) == 7
    for (method, budget), mean in means.items():
        assert isinstance(mean, Combined)
        row = rows[f"{method}2 seeds", f"{100 * budget:.0f} %"]
        assert row["n"] == name_count(mean).replace("x", "\N{MULTIPLICATION SIGN}")
        for name, metric in mean.metrics.items():
            if name == "exact_answer":  # the same in all rows: in the line above the table
                continue
            style = choose_style(one.metrics.get(name) for one in means.values())
            text = format_cell(replace(metric, df=None), style)
            assert row[name].replace(" ", "").rstrip("†") == text.replace(" ", "")
    points = page.locator("#pareto .hit")
    assert points.count() == 6
    page.select_option("#differ", "random")
    rows = read_rows(page)
    for method in ("heatkv", "snapkv"):
        for budget in BUDGETS:
            found = compare_seeds(means[method, budget], means["random", budget], seeds_dir)
            row = rows[f"{method}2 seeds", f"{100 * budget:.0f} %"]
            for name, metric in found.items():
                assert row[name] == show(metric), (method, budget, name)
    page.select_option("#seeds", "each")
    assert points.count() == 12


@pytest.mark.nightly
@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_intervals_over_seeds_and_calibrations_are_the_reports(page: Any, seeds: int) -> None:
    choices = [(seed, calibration) for seed in range(seeds) for calibration in range(2)]
    table = np.random.default_rng(seeds).normal(size=(len(PROMPTS), len(choices)))
    table += [3 * (-1) ** (seed + calibration) for seed, calibration in choices]  # neither kind alone has it
    found = page.evaluate(
        "([table, choices]) => surroundMean(table, choices, null)", [table.tolist(), choices]
    )
    levels = [[one[kind] for one in choices] for kind in range(2)]
    averaged = [
        np.stack([table[:, np.array(own) == level].mean(1) for level in range(max(own) + 1)], 1)
        for own in levels
        if max(own) > 0
    ]
    widest = max((cross_interval(one)[0] for one in averaged), key=lambda one: one.high - one.low)
    assert found == pytest.approx([widest.low, widest.high], abs=1e-3)


@pytest.mark.nightly
def test_points_are_drawn_at_their_memory(page: Any) -> None:
    places: dict[str, set[float]] = {}
    for mark in page.locator("#pareto .hit").all():
        budget = mark.get_attribute("aria-label").split(", ")[1].split(" %")[0]
        box = mark.bounding_box()
        places.setdefault(budget, set()).add(round(box["x"] + box["width"] / 2, 1))
    assert [len(xs) for xs in places.values()] == [1, 1]


@pytest.mark.nightly
def test_seeds_that_change_no_sample_count_once(browser: Any, tmp_path: Path) -> None:
    for method, values in (("full", [0.0, 0.0]), ("heatkv", [30.0, 33.0]), ("random", [20.0, 21.0])):
        for seed in (0, 1):
            name = f"{method}-{seed}"
            metric = Metric(float(np.mean(values)), "higher", n=2, evaluator="psnr", digits=2)
            config = {"model": {"name": "m"}, "seed": seed}
            reference = None if method == "full" else f"full-{seed}"
            run = made_up(method, 0.1, {"psnr": metric}, run=name, n=2, config=config, reference=reference)
            run = replace(run, memory=with_bytes(run.memory, 0.1))
            samples = [(prompt, {}, b"") for prompt in PROMPTS[1:3]]
            folder = write_run(tmp_path, run, samples, values={"psnr-": {"psnr": values}})
            scores = {"psnr": {**asdict(Score(float(np.mean(values)), 2)), **asdict(SPECS["psnr"])}}
            record = {"evaluator": "psnr", "protocol": "", "scores": scores}
            (folder / "metrics" / "psnr-.json").write_text(json.dumps(record))
    page = browser.new_page()
    page.goto(write_dashboard(tmp_path).as_uri())
    assert {row["n"] for row in read_rows(page).values()} == {"2"}
    page.select_option("#differ", "random")
    [metric] = compare_runs(tmp_path / "m/heatkv-0", tmp_path / "m/random-0").values()
    assert read_rows(page)["heatkv2 seeds", "10 %"]["psnr"] == show(metric)
    page.close()
