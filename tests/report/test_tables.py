"""Tables say what results.json says, whatever the width of the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvbench.eval.protocol.scores import Metric
from kvbench.report.ablations import find_ablations
from kvbench.report.conditions import find_group
from kvbench.report.runs_table import identifying_columns, list_metrics, name_methods, show_runs
from kvbench.report.seeds import group_seeds
from kvbench.report.tables import choose_style, format_cell, format_markdown, print_rows
from kvbench.runs.record.results import Results
from tests.report.test_texts import CHANNEL, GENEVAL, ROTATED
from tests.support.results import LPIPS, PSNR, made_up, printed
from tests.support.texts import check_text

SKIPPED = replace(LPIPS, status="skipped", reason="weights missing: alexnet.pth. Get it from [there]")


def run_with(method: str, budget: float, psnr: float | None, model: str = "infinity_tiny") -> Results:
    ends = None if psnr is None else (psnr - 1, psnr + 2)
    metrics = {
        "psnr": replace(PSNR, value=psnr, ci95=ends),
        "geneval[scenes]": GENEVAL,
        "geneval[scenes]/colors": replace(GENEVAL, value=0.25, detail=True),
        "lpips": SKIPPED,
    }
    return made_up(method, budget, metrics, model)


RUNS = [run_with("heatkv", 0.1, 25.0), run_with("full", 1.0, None), run_with("heatkv", 0.04, 21.5)]


def test_columns_are_the_metrics_that_runs_hold_by_evaluator() -> None:
    kid = Metric(1.0, "lower", evaluator="kid")
    later = made_up(
        "swa", 0.1, {"kid_clean": kid, "is": Metric(9.0, "higher", evaluator="is"), "kid_scenes": kid}
    )
    assert list_metrics([*RUNS, later]) == ["psnr", "geneval[scenes]", "kid_clean", "kid_scenes", "is"]
    assert list_metrics(RUNS, details=True) == ["psnr", "geneval[scenes]", "geneval[scenes]/colors"]
    reference = made_up("full", 1.0, {**RUNS[1].metrics, "fid": replace(PSNR, value=None, evaluator="fid")})
    fid = made_up("swa", 0.1, {"fid": Metric(2.0, "lower", evaluator="fid")})
    assert list_metrics([reference, *RUNS, fid]) == ["psnr", "geneval[scenes]", "fid"]


LOPSIDED = Metric(7.0, "higher", ci95=(5.0, 8.0))
"""A metric whose interval has halves of 2 and 1."""


@pytest.mark.parametrize(
    ("metric", "style", "text"),
    [
        (Metric(-0.00001, "lower", ci95=(-0.1, 0.2)), "range", "0.0000 [-0.1000, 0.2000]"),
        (Metric(7.0, "higher", digits=0, ci95=(5.0, 9.0)), "half", "7 ±2"),
        (Metric(7.0, "higher", digits=0, ci95=(5.0, 8.0)), "half", "7 [5, 8]"),
        (Metric(100.0, "higher", digits=1, ci95=(94.3, 100.0)), "half", "100.0 [94.3, 100.0]"),
        # 1.0 and 1.1: 0.095 apart
        (Metric(10.0, "higher", ci95=(9.0, 11.1), digits=2), "half", "10.00 ±1.05"),
        (Metric(10.0, "higher", ci95=(9.0, 11.2), digits=1), "half", "10.0 [9.0, 11.2]"),
        (Metric(7.0, "higher", digits=0, ci95=(5.0, 8.0)), "value", "7"),
        (Metric(7.25, "higher", digits=1, ci95=(5.0, None)), "range", "7.2"),  # an infinite end
        (Metric(None, "higher"), "half", "-"),
        (Metric(None, "higher", status="failed"), "half", "failed"),
    ],
)
def test_cells_have_the_metrics_own_digits(metric: Metric, style: str, text: str) -> None:
    assert format_cell(metric, choose_style([metric], style)) == text
    assert choose_style([metric, LOPSIDED], "half") == "range"
    assert choose_style([metric, LOPSIDED], "value") == "value"


def one(method: str, prompts: str = "scenes", **settings: object) -> Results:
    config = {
        "model": {"name": "m"},
        "prompts": {"path": f"here/{prompts}.txt"},
        "method": {"sinks": 1, **settings},
    }
    return made_up(method, 0.1, {}, config=config)


SNAP = {"_target_": "x.y.SnapKV", "sinks": 1}
HEAVY = {"_target_": "x.z.H2O", "sinks": 1, "recent": 0.5}
PLAIN: Mapping[str, object] = {
    "model": {"name": "m", "sampling": {"tau": 1.0}, "default_eval": "psnr"},
    "prompts": {"context": 256, "count": 4},
    "calibrate": {"count": 10, "seed": 1},
    "method": {"sinks": 1},
    "cache_dtype": "auto",
    "storage": CHANNEL,
    "noise": "stream",
}


def changed(path: str, value: object) -> Results:
    """A calibrated run in which one key of `PLAIN` has another value."""
    section, _, name = path.partition(".")
    own = PLAIN.get(section)
    config = {**PLAIN, section: {**own, name: value} if name and isinstance(own, dict) else value}
    run = made_up("heatkv", 0.1, {}, config=config, run=f"heatkv-{path}")
    return replace(run, provenance={"calibration_sha256": "0"})


def weighted(digit: str, **more: object) -> Results:
    return replace(one("heatkv"), provenance={"weights_sha256": digit * 64}, run=digit, **more)


CHANGES = {
    "model.sampling": {"tau": 0.5},
    "model.default_eval": "kl",
    "model.tensor_parallel": 2,
    "prompts.context": 512,
    "prompts.count": 8,
    "calibrate.count": 4,
    "storage": ROTATED,
    "shuffle": 0,
    "batch_invariant": True,
    "noise": "counter",
}
TOLD: Mapping[str, Sequence[Results]] = {
    "a setting of one method": [one("hard_kv", p=0.7), one("hard_kv", p=0.9), one("random", seed=3)],
    "settings of other methods and prompts": [one("a", p=1), one("b", p=2), one("a", "parti", p=3)],
    "inner methods": [one("lookm", base=SNAP), one("lookm", base=HEAVY)],
    "a setting of an inner method": [one("lookm", base=HEAVY), one("lookm", base={**HEAVY, "recent": 0.3})],
    "both": [one("lookm", base=base) for base in (SNAP, HEAVY, {**HEAVY, "recent": 0.3})],
    "prompts": [one("a"), one("a", "parti")],
    "weights of one name": [
        *map(weighted, "ab"),
        weighted("c", config={"model": {"name": "n"}}),
        one("heatkv"),
    ],
    **{path: [changed("seed", 0), changed(path, value)] for path, value in CHANGES.items()},
}
"""Runs by what tells them apart, or does not."""


def test_columns_and_names_are_what_tells_runs_apart() -> None:
    texts = [
        f"## {what}\n\n{format_markdown(identifying_columns(runs))}\nnames: {', '.join(name_methods(runs))}\n"
        for what, runs in TOLD.items()
    ]
    check_text("columns.txt", "\n".join(texts))


@pytest.mark.parametrize("width", [60, 80, 120, 160])
@pytest.mark.parametrize("count", [1, 5, 25])
def test_every_metric_is_shown_whole_however_many_there_are(width: int, count: int) -> None:
    def measure(place: int) -> dict[str, Metric]:
        names = {i: f"metric_number_{i}[of_some_network]" for i in range(count)}
        value = {i: 100.0 + i + place / 10 for i in names}
        return {
            name: Metric(value[i], "lower", ci95=(value[i] - 4.5, value[i] + 4.5), digits=3)
            for i, name in names.items()
        }

    runs = [made_up(f"method_{m}", 0.1, measure(m)) for m in range(3)]
    text = printed(width, show_runs, runs)
    assert max(map(len, text.splitlines())) <= width
    for i in range(count):
        assert all(text.count(f" {100 + i}.{m}00 ") == 1 for m in range(3))
    assert text.count("↓") == count
    blocks = text.split("method  ")[1:]
    assert all(block.count("method_1 ") == 1 for block in blocks)
    assert (len(blocks) > 1) == (count == 25 or (count == 5 and width < 160))


@pytest.mark.parametrize("width", [80, 120])
def test_nine_rows_with_long_names_are_two_numbered_blocks(width: int) -> None:
    """With two lines before its jobs and one after the tables, a sweep of nine is at most 40 lines."""
    names = ("psnr", "psnr_mean_mse", "ssim", "lpips_scenes", "fid_scenes")
    runs = []
    for i in range(9):
        metrics = {name: replace(PSNR, value=20.0 + i, ci95=(18.0, 20.5 + i)) for name in names}
        run = made_up("expected_attention/calibrated", 0.1, metrics, run=str(i))
        runs.append(
            replace(run, config={**run.config, "method": {"sinks": i % 3, "covariance": "abc"[i // 3]}})
        )
    text = printed(width, show_runs, runs)
    assert len(text.splitlines()) <= 40 - 2 - 9 - 1
    first, second = text.split("\n\n")
    assert [line.split()[:2] for line in first.splitlines()[-9:]] == [
        [str(i), runs[0].method] for i in range(1, 10)
    ]
    assert [line.split()[0] for line in second.splitlines()[-9:]] == [*"123456789"]


def test_a_metric_that_is_equal_in_all_rows_is_one_line() -> None:
    equal, other = replace(PSNR, value=25.0), replace(PSNR, value=24.0)
    runs = [made_up(name, 0.1, {"psnr": equal, "ssim": other}) for name in ("h2o", "snapkv")]
    for last, line in ((equal, True), (other, False), (replace(PSNR, value=None, status="failed"), False)):
        text = printed(160, show_runs, [*runs, made_up("swa", 0.1, {"psnr": last, "ssim": equal})])
        assert ("; every row that has it: psnr 25.00 (95 %" in text) == line == ("psnr ↑" not in text)
        assert "ssim ↑" in text


def test_rows_of_a_sweep_keep_the_order_of_its_jobs() -> None:
    runs = [made_up(name, budget, {}) for name in ("swa", "h2o", "cake") for budget in (0.4, 0.1)]
    for as_given, wanted in (
        (True, "swa 0.4 h2o 0.4 cake 0.4 swa 0.1 h2o 0.1 cake 0.1"),
        (False, "cake 0.1 h2o 0.1 swa 0.1 cake 0.4 h2o 0.4 swa 0.4"),
    ):
        lines = [
            line.split()[:2]
            for line in printed(160, partial(show_runs, as_given=as_given), runs).splitlines()
        ]
        assert (
            " ".join(" ".join(line) for line in lines if line and line[0] in ("swa", "h2o", "cake")) == wanted
        )


def test_models_share_a_table_if_they_have_the_same_metrics() -> None:
    known = replace(PSNR, value=25.0)
    image = [made_up("h2o", 0.1, {"psnr": known}, model) for model in ("var_tiny", "infinity_tiny")]
    text = made_up("h2o", 0.1, {"kl": known}, "reasoner_tiny")
    first, _, second = printed(160, show_runs, [text, *image]).partition("\nreasoner_tiny, n = 96")
    assert first.startswith("infinity_tiny, var_tiny, n = 96")
    assert [("psnr ↑" in one, "kl ↑" in one) for one in (first, second)] == [(True, False), (False, True)]


def test_a_column_wider_than_the_terminal_is_folded(tmp_path: Path) -> None:
    rows = [{"what": "[x]", "why": "because " * 20}]
    text = printed(60, print_rows, "title", rows, 2)
    assert max(map(len, text.splitlines())) <= 60
    assert (text.count("because"), text.count("[x]")) == (20, 1)


def test_runs_of_both_kinds_of_noise_never_meet() -> None:
    stream, counter, before = (
        replace(run, run=f"heatkv-0.1-{number}", config={**run.config, **noise})
        for number, noise in enumerate(({"noise": "stream"}, {"noise": "counter"}, {}))
        for run in [run_with("heatkv", 0.1, 25.0)]
    )
    assert find_group(stream) == find_group(before) != find_group(counter)
    assert len(group_seeds([stream, counter, before])) == 2
    other = replace(counter, run="other", config={**counter.config, "method": {"sinks": 2}})
    assert find_ablations([counter, other])
    assert not find_ablations([stream, other])
