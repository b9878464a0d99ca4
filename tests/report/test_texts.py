"""Golden texts of the report for runs of every kind: terminal, Markdown, LaTeX, CSV; scores of the full cache."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvbench.dashboard.document import make_document
from kvbench.eval.protocol.scores import Metric
from kvbench.eval.text.answers import AccuracyChange, ExactAnswerChange
from kvbench.eval.text.full_cache import CHANGES, TASKS
from kvbench.eval.text.string_match import StringMatchAllChange, StringMatchPartChange
from kvbench.report.code_notes import list_marks
from kvbench.report.document import write_report
from kvbench.report.full_scores import explain_mark, is_failed
from kvbench.report.one_run import describe_run, show_run
from kvbench.report.runs_table import show_runs
from kvbench.runs.record.results import Evaluated, Results
from tests.support.places import ROOT
from tests.support.results import LPIPS, PSNR, hold, made_up, printed
from tests.support.run_folders import write_run
from tests.support.texts import check_text

GENEVAL = Metric(0.5, "higher", evaluator="geneval", digits=3, n=96)
SHARE = Metric(0.0, "higher", evaluator="retrieved", protocol="forced", digits=3, n=20)
LACKING = {
    name: replace(LPIPS, status="skipped", reason=f"weights missing: {name}. Get it with: make [it]")
    for name in ("lpips", "fid")
}


def run(method: str, budget: float, value: float | None, /, **config: object) -> Results:
    """A run with PSNR, parts of it, and metrics without a value; `config` are keys of its configuration."""
    psnr = replace(PSNR, value=value, ci95=None if value is None else (value - 1, value + 2), n=96)
    parts = {name: replace(psnr, detail=name == "part") for name in ("part", "psnr_mean_mse", "n_identical")}
    metrics = {"psnr": psnr, **parts, "geneval[scenes]": GENEVAL, **LACKING}
    whole = {
        "model": {"name": "m"}, "method": {"sinks": 1}, "cache_dtype": "auto", "noise": "stream", **config,
    }  # fmt: skip
    name = f"{method}-{budget:g}-{len(str(config))}"
    return made_up(method, budget, metrics, config=whole, run=name)


def held(method: str, budget: float, dtype: str, unit: str = "tokens") -> Results:
    return hold(run(method, budget, 30.0 + budget, cache_dtype=dtype), budget, dtype, unit)


def with_memory(one: Results, **numbers: object) -> Results:
    return replace(one, memory=replace(one.memory, **numbers))


def with_latency(one: Results, **numbers: object) -> Results:
    return replace(one, latency=replace(one.latency, **numbers))


def asked(method: str, value: float, full: float, /, **more: object) -> Results:
    """A run of passkeys; its full cache finds the share `full`."""
    known = {
        "retrieved": replace(SHARE, value=value),
        "retrieved_full": replace(SHARE, value=full, detail=True),
    }
    prompts = {"prompts": {"_target_": "kvbench.prompts.retrieval.Passkey"}}
    return replace(run(method, 1.0 if method == "full" else 0.25, None, **prompts, **more), metrics=known)


def list_plain() -> list[Results]:
    other = replace(run("swa", 0.1, None), metrics={"lpips": replace(LPIPS, value=0.25)})
    random = run("heatkv", 0.1, 25.0, model={"name": "var_d30", "weights": "random"}, budget=650)
    return [run("heatkv", 0.1, 25.0), run("full", 1.0, None), run("heatkv", 0.04, 21.5), other, random]


def list_bytes() -> list[Results]:
    wide = held("cake", 0.1, "float32")  # a dtype that the device chose
    return [
        *(held(method, 0.1, "float16", "bytes") for method in ("heatkv", "swa")),
        *(held("full", 1, dtype) for dtype in ("float32", "int4")),
        held("heatkv", 0.1, "float16"),
        held("swa", 0.1, "float32", "bytes"),
        replace(wide, config={**wide.config, "cache_dtype": "auto"}),
    ]


def list_costs() -> list[Results]:
    """Times of images, one scored, and a text; on a busy machine, without some samples; unused budgets; a GPU."""
    one = run("heatkv", 0.1, 25.0)
    full = with_memory(run("full", 1, None), peak_bytes=800, rebuild_bytes=900, transient_bytes=100, batch=2)
    needed = {"peak_bytes": 90, "rebuild_bytes": 100, "transient_bytes": 60, "state_bytes": 40, "batch": 1}
    text = with_latency(replace(one, run="text", method="h2o"), tokens_per_second=70.0)
    return [
        replace(with_memory(one, **needed), reference=full.run, run="needed", method="cake"),
        with_memory(full, gpu_peak_bytes=3 * 2**20),
        text,
        replace(one, evaluated={"kl": Evaluated({}, "ok", "forced")}, run="read", method="tova"),
        with_latency(replace(one, run="mixed", method="cam"), samples=40, others=56),
        with_memory(
            replace(one, run="short", method="d2o"), budget_tokens=90, last_tokens=26, least_share=1.0
        ),
        with_memory(
            replace(one, run="unused", method="cur"), budget_tokens=90, last_tokens=26, least_share=0.289
        ),
        with_latency(replace(one, run="busy", method="rkv"), busy=True),
    ]


def list_answers() -> list[Results]:
    known = [asked("full", 0.05, 0.05), asked("h2o", 0.0, 0.05), asked("tova", 0.499, 0.499)]
    return [*known, asked("full", 0.9, 0.5, model={"name": "n"}), asked("h2o", 0.2, 0.5, model={"name": "n"})]


def answered(method: str, accuracy: float, **more: float | None) -> Results:
    """A run of problems, of which `accuracy_change` makes the full cache's accuracy known."""
    right = replace(SHARE, evaluator="accuracy", needs_reference=True)
    metrics = {name: replace(right, value=value) for name, value in more.items()}
    metrics["accuracy"] = replace(right, value=accuracy, needs_reference=False)
    return made_up(method, 1.0 if method == "full" else 0.25, metrics, "qwen3_8b")


def list_code() -> list[Results]:
    """Runs of a class that matches its pin, and of an edited one, in checkouts with changes or without."""
    runs = []
    for seed, digit in enumerate(("", "a1", "b2", "c3", "d4", "e5")):
        own = {"revision": 1, "sha256": "abcdef0123456789" if seed == 1 else "0", "pinned": seed != 1}
        code = {"commit": "5", "diff_sha256": digit * 20}
        known = {"classes": {"method": {"x.Snap": own}}, "code": code}
        one = run("snapkv", 0.1, 20.0 + seed, seed=seed)
        runs.append(replace(one, provenance=known, run=f"snapkv-{seed}"))
    return runs


SETS: Mapping[str, Callable[[], list[Results]]] = {
    "plain": list_plain, "bytes": list_bytes, "costs": list_costs,
    "answers": list_answers, "code": list_code,
    "solved": lambda: [asked("full", 0.9, 0.9), asked("h2o", 0.2, 0.9)],
    # A hard set of problems is no failed task.
    "problems": lambda: [answered("full", 0.3, accuracy_change=None), answered("rkv", 0.1, accuracy_change=-0.2)],
    "unpaired": lambda: [answered("rkv", 0.5)],
    "counts": lambda: [
        replace(run("h2o", budget, 10.0 + n), n=n, run=f"{n}")
        for budget, n in ((0.1, 96), (0.2, 96), (0.1, 16))
    ],
}  # fmt: skip
"""Runs by the name of their golden text."""


@pytest.mark.parametrize("name", SETS)
def test_the_report_is_the_golden_text(name: str, tmp_path: Path) -> None:
    runs = SETS[name]()
    failed = [("failed method=[a] budget=2", "budget=2: too [b]")]
    widths, forms = ((80, 120, 160), (False, True)) if name == "plain" else ((160,), (True,))
    texts = [printed(width, show_runs, runs, failed) for width in widths]
    texts += [describe_run(one, 60) for one in runs]
    texts += [printed(150, partial(show_run, verbose=verbose), one) for one in runs for verbose in forms]
    write_report(tmp_path, runs, figures=[tmp_path / "fidelity.png"])
    texts += [(tmp_path / f"report.{end}").read_text(encoding="utf-8") for end in ("md", "tex", "csv")]
    check_text(f"report_{name}.txt", "\n".join(texts).replace("\r\n", "\n"))


@pytest.mark.parametrize(("full", "failed"), [(0.499, True), (0.5, False)])
def test_a_task_is_failed_below_the_metrics_constant(full: float, failed: bool) -> None:
    run = asked("h2o", 0.0, full)
    assert is_failed(run, "retrieved") == failed
    assert (list_marks([run], ()) != []) == failed
    assert "below 0.5" in explain_mark(*TASKS)
    told = "fewer than half of the answers (`MIN_FULL_ACCURACY`, 0.5)"
    assert told in (ROOT / "docs" / "metrics.md").read_text("utf-8")


def test_the_page_has_the_score_and_the_mark(tmp_path: Path) -> None:
    for run in (asked("h2o", 0.0, 0.05), replace(asked("h2o", 0.2, 0.9), run="h2o-solved")):
        write_run(tmp_path, run, [])
    page = make_document(tmp_path)
    assert page["failed"] == explain_mark(*TASKS)
    scores = [run["metrics"]["retrieved"] for run in page["runs"]]
    assert sorted((one["full"], one.get("failed")) for one in scores) == [(0.05, True), (0.9, None)]


def test_changes_are_the_metrics_of_answers() -> None:
    changes = (AccuracyChange, ExactAnswerChange, StringMatchAllChange, StringMatchPartChange)
    pairs = {kind.__mro__[2].name: kind.name for kind in changes}
    assert pairs == CHANGES
