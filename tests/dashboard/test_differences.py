"""Differences and means of the page are the report's."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.dashboard.document import make_document
from kvbench.dashboard.page import write_dashboard
from kvbench.eval.protocol.compare import compare_runs
from kvbench.eval.protocol.crossed import cross_interval
from kvbench.eval.protocol.scores import Metric, MetricSpec, Score, share_score
from kvbench.report.collect import collect_runs
from kvbench.report.seeds import Combined, MeanMetric, combine_seeds, compare_seeds, name_count
from kvbench.report.tables import choose_style, format_cell
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
METHODS = ("heatkv", "random", "snapkv", "h2o")
GREEDY = ("snapkv", "h2o")
"""Methods whose samples no seed changes."""
BUDGETS = (0.1, 0.2)
PROMPTS = [f"prompt {index // 2}" for index in range(14)]
TAGS = [*"aaaabbbbbbcccc"]


def draw(seed: int, method: str, budget: float) -> dict[str, list[float | None]]:
    """Values per sample; the last PSNR is of an image equal to its reference; `vqascore` differs by almost all."""
    seed = 0 if method in GREEDY else seed
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


def average(name: str, values: list[float]) -> float:
    """The mean of the means of strata."""
    tags = TAGS if SPECS[name].strata else ["a"] * len(values)
    groups = [[one for one, own in zip(values, tags, strict=True) if own == tag] for tag in sorted({*tags})]
    return float(np.mean([np.mean(own) for own in groups]))


def show(metric: Metric) -> str:
    """A difference as the page writes it."""
    assert metric.value is not None
    digits = metric.digits
    text = f"{metric.value:+.{digits}f}" if round(metric.value, digits) else f"{0:.{digits}f}"
    ends = "" if metric.interval is None else " [{:.{d}f}, {:.{d}f}]".format(*metric.interval, d=digits)
    return (text + ends).replace("-", "\N{MINUS SIGN}")


@pytest.fixture(scope="module")
def seeds_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The methods at two budgets and two seeds, with their references."""
    runs_dir = tmp_path_factory.mktemp("seeds")
    samples = [(prompt, {}, b"") for prompt in PROMPTS]
    for seed in (0, 1):
        config = {"model": {"name": "infinity_tiny"}, "seed": seed}
        full = made_up("full", 1.0, {}, run=f"full-{seed}", n=len(PROMPTS), config=config)
        write_run(runs_dir, full, samples)
        for method, budget in product(METHODS, BUDGETS):
            columns, metrics, scores = draw(seed, method, budget), {}, {}
            for name, column in columns.items():
                values, spec = [one for one in column if one is not None], SPECS[name]
                score = Score(float(np.mean(values)), len(values))
                scores[name] = share_score(values) if name in ANSWERS else score
                known = {"n": len(PROMPTS), "ci": scores[name].ci, "evaluator": name, "digits": spec.digits}
                metrics[name] = Metric(average(name, values), spec.better, **known)
            own = {"run": f"{method}-{budget}-{seed}", "n": len(PROMPTS), "reference": f"full-{seed}"}
            run = made_up(method, budget, metrics, config=config | {"budget": budget}, **own)
            run = replace(run, memory=with_bytes(run.memory, budget))
            each = {f"{name}-": {name: column, "tag": TAGS} for name, column in columns.items()}
            folder = write_run(runs_dir, run, samples, values=each)
            for name, spec in SPECS.items():
                whole = {name: {**asdict(scores[name]), **asdict(spec)}}
                record = {"evaluator": name, "protocol": "", "scores": whole}
                (folder / "metrics" / f"{name}-.json").write_text(json.dumps(record))
    for path in runs_dir.rglob("*-1/samples.jsonl"):
        path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    return runs_dir


@pytest.fixture(scope="module")
def address(seeds_dir: Path) -> str:
    """The page of two seeds."""
    return write_dashboard(seeds_dir).as_uri()


def read_rows(page: Any) -> dict[tuple[str, str], dict[str, str]]:
    """Texts of the table by method and seed, and budget."""
    heads = [head.strip(" ▾▴↑↓") for head in page.locator("#runs thead th").all_inner_texts()]
    lines = [row.locator("td").all_inner_texts() for row in page.locator("#runs tbody tr").all()]
    rows = [dict(zip(heads, (cell.replace("[", " [") for cell in line), strict=True)) for line in lines]
    return {(" ".join(row["method"].split()), row["budget"]): row for row in rows}


@pytest.mark.slow
def test_differences_of_one_seed_are_the_reports(page: Any, seeds_dir: Path) -> None:
    page.select_option("#seeds", "each")
    page.locator("#details").evaluate("box => { box.checked = true; }")
    page.select_option("#differ", "random")
    rows, seen = read_rows(page), set()
    for seed, method, budget in product((0, 1), ("heatkv", "snapkv"), BUDGETS):
        folders = [seeds_dir / "infinity_tiny" / f"{one}-{budget}-{seed}" for one in (method, "random")]
        row = rows[f"{method}seed {seed}", f"{100 * budget:.0f} %"]
        for name, metric in compare_runs(*folders).items():
            assert row[name].replace("base", "") == show(metric), (folders, name)
            low, high = metric.interval or (0, 0)
            better = low > 0 if metric.better == "higher" else high < 0
            cell = page.locator("#runs tbody .num", has_text=row[name].replace(" [", "[")).first
            assert cell.locator("b").count() == better
            seen.add(better)
    assert seen == {True, False}
    assert rows["heatkvseed 0", "10 %"]["vqascore"].endswith(", 1.000]")  # cut: a share cannot change by more
    assert rows["randomseed 0", "10 %"]["psnr"] == "base"


@pytest.mark.nightly
def test_rows_are_means_over_seeds_unless_single_ones_are_asked_for(page: Any, seeds_dir: Path) -> None:
    runs = collect_runs(seeds_dir)
    means = {(run.method, run.memory.budget): run for run in combine_seeds(runs, seeds_dir)}
    rows = read_rows(page)
    assert len(rows) == len(means) == 9
    for (method, budget), mean in means.items():
        assert isinstance(mean, Combined)
        row = rows[f"{method}2 seeds", f"{100 * budget:.0f} %"]
        assert row["n"] == name_count(mean).replace("x", "\N{MULTIPLICATION SIGN}")
        for name, metric in mean.metrics.items():
            if name == "exact_answer":  # the same in all rows: in the line above the table
                continue
            style = choose_style(one.metrics.get(name) for one in means.values())
            shown = replace(metric, df=None) if isinstance(metric, MeanMetric) else metric
            text = format_cell(shown, style)
            assert row[name].replace(" ", "").rstrip("†") == text.replace(" ", "")
    points = page.locator("#pareto .hit")
    assert points.count() == 8
    for base, others in (("random", ("heatkv", "snapkv", "h2o")), ("snapkv", ("h2o",))):
        page.select_option("#differ", base)
        rows = read_rows(page)
        for method, budget in product(others, BUDGETS):
            row = rows[f"{method}2 seeds", f"{100 * budget:.0f} %"]
            found = compare_seeds(means[method, budget], means[base, budget], seeds_dir)
            for name, metric in found.items():
                assert row[name] == show(metric), (method, budget, base, name)
    page.select_option("#seeds", "each")
    assert points.count() == 16


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_intervals_over_seeds_and_calibrations_are_the_reports(
    seeds: int, run_script: Callable[..., str], tmp_path: Path
) -> None:
    choices = [(seed, calibration) for seed in range(seeds) for calibration in range(2)]
    table = np.random.default_rng(seeds).normal(size=(len(PROMPTS), len(choices)))
    table += [3 * (-1) ** (seed + calibration) for seed, calibration in choices]  # neither kind alone has it
    program = f"console.log(JSON.stringify(surroundMean({table.tolist()}, {[*map(list, choices)]}, null)))"
    quantiles = make_document(tmp_path)["quantiles"]
    found = json.loads(run_script(program, "intervals", "crossed", quantiles=quantiles))
    averaged = [
        np.stack([table[:, np.array(own) == level].mean(1) for level in range(max(own) + 1)], 1)
        for own in zip(*choices, strict=True)
        if max(own) > 0
    ]
    widest = max((cross_interval(one)[0] for one in averaged), key=lambda one: one.high - one.low)
    assert found == pytest.approx([widest.low, widest.high], abs=1e-3)
