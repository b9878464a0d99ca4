"""Tables say what results.json says, whatever the width of the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest

from kvbench.eval.protocol.scores import Metric
from kvbench.report.runs_table import identifying_columns, list_metrics, name_methods, show_runs
from kvbench.report.tables import choose_style, format_cell, format_markdown
from kvbench.runs.record.results import Results
from tests.report.test_texts import GENEVAL
from tests.support.results import LPIPS, PSNR, made_up, printed
from tests.support.texts import check_text


def test_columns_are_the_metrics_that_runs_hold_by_evaluator() -> None:
    kid, fid = Metric(1.0, "lower", evaluator="kid"), Metric(None, "lower", evaluator="fid")
    known = {
        "psnr": replace(PSNR, value=25.0),
        "geneval[scenes]": GENEVAL,
        "lpips": replace(LPIPS, status="skipped"),
    }
    colors = {"geneval[scenes]/colors": replace(GENEVAL, detail=True)}
    first = made_up("full", 1.0, {**known, **colors, "fid": fid})
    later = made_up(
        "swa", 0.1, {"kid_clean": kid, "is": Metric(9.0, "higher", evaluator="is"), "kid_scenes": kid}
    )
    assert list_metrics([first, later]) == ["psnr", "geneval[scenes]", "kid_clean", "kid_scenes", "is"]
    assert list_metrics([first], details=True) == ["psnr", "geneval[scenes]", "geneval[scenes]/colors"]
    scored = made_up("swa", 0.1, {"fid": replace(fid, value=2.0)})
    assert list_metrics([first, later, scored])[2] == "fid"


LOPSIDED = Metric(7.0, "higher", ci95=(5.0, 8.0))
"""A metric whose interval has halves of 2 and 1."""


@pytest.mark.parametrize(
    ("metric", "style", "text"),
    [
        (Metric(-0.00001, "lower", ci95=(-0.1, 0.2)), "range", "0.0000 [-0.1000, 0.2000]"),
        (Metric(7.0, "higher", digits=0, ci95=(5.0, 9.0)), "half", "7 ±2"),
        (Metric(7.0, "higher", digits=0, ci95=(5.0, 8.0)), "half", "7 [5, 8]"),
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


CHANNEL = {"keys": "channel", "values": "token", "before_rotation": True}
ROTATED = {"keys": "rotated", "values": "rotated", "before_rotation": False}
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
    "storage of few bits": [
        made_up("heatkv", 0.1, {}, config={"cache_dtype": dtype, "storage": own}, run=f"{dtype}")
        for dtype in ("int4", "fp8", "auto")
        for own in (CHANNEL, ROTATED)
    ],
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


@pytest.mark.parametrize(("width", "count"), [(60, 5), (80, 25), (160, 1), (160, 5)])
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


def test_tables_of_many_rows_are_the_golden_text() -> None:
    """Nine rows with long names in two numbered blocks, a metric that reads the same in all rows, orders of rows."""
    names = ("psnr", "psnr_mean_mse", "ssim", "lpips_scenes", "fid_scenes")
    nine = []
    for i in range(9):
        metrics = {name: replace(PSNR, value=20.0 + i, ci95=(18.0, 20.5 + i)) for name in names}
        run = made_up("expected_attention/calibrated", 0.1, metrics, run=str(i))
        settings = {"sinks": i % 3, "covariance": "abc"[i // 3]}
        nine.append(replace(run, config={**run.config, "method": settings}))
    texts = [printed(width, show_runs, nine) for width in (80, 120)]
    equal, other, failed = (
        replace(PSNR, value=25.0),
        replace(PSNR, value=24.0),
        replace(PSNR, status="failed"),
    )
    runs = [made_up(name, 0.1, {"psnr": equal, "ssim": other}) for name in ("h2o", "snapkv")]
    for last in (equal, other, failed):
        text = made_up("rkv", 0.1, {"kl": equal}, "reasoner_tiny")
        texts.append(
            printed(160, show_runs, [text, *runs, made_up("swa", 0.1, {"psnr": last, "ssim": equal})])
        )
    jobs = [made_up(name, budget, {}) for name in ("swa", "h2o", "cake") for budget in (0.4, 0.1)]
    texts += [printed(80, partial(show_runs, as_given=as_given), jobs) for as_given in (True, False)]
    check_text("tables.txt", "\n".join(texts))
