"""Measured runs stand beside the rows that papers published."""

from dataclasses import replace
from functools import partial

from kvbench.eval.protocol.scores import Metric
from kvbench.report.papers import comparison as summary
from kvbench.report.papers import published
from kvbench.report.tables import Row, format_cell
from tests.support.results import LPIPS, PSNR, configured_run

METRICS = {
    "psnr": replace(PSNR, value=21.0, ci95=(20.0, 22.0)),
    "lpips": replace(LPIPS, status="skipped", reason="weights missing"),
    "lpips_scenes": Metric(0.5, "lower", ci95=(0.4, 0.6)),
    "geneval[scenes]": Metric(0.9, "higher", digits=3),
    "geneval[scenes]/position": Metric(0.8, "higher", digits=3, detail=True),
}
run = partial(configured_run, metrics=METRICS)


def texts(row: Row) -> dict[str, str]:
    return {name: format_cell(cell, "half") for name, cell in row.items()}


def test_measured_stands_beside_published_under_its_own_name() -> None:
    runs = [run("heatkv", 0.1), run("full", 1), run("newest", 0.1)]
    table = published.find("heatkv_table1")
    full, heatkv = map(texts, summary.make_rows(table, runs))
    assert (heatkv["method"], heatkv["budget"]) == ("heatkv", "0.1")
    assert heatkv["cache MiB"] == "12.35"
    assert heatkv["cache MiB, infinity_2b / infinity_8b"] == "3900 / 8531"
    assert heatkv["psnr"] == "21.00 ±1.00"
    assert heatkv["psnr, infinity_2b / infinity_8b"] == "25.40 / 24.41"
    assert heatkv["lpips"] == "skipped"
    assert heatkv["lpips_scenes"] == "0.5000 ±0.1000"
    assert not any("lpips_scenes" in name and "infinity" in name for name in heatkv)
    assert full["psnr"] == full["lpips"] == full["psnr, infinity_2b / infinity_8b"] == "-"
    header = summary.make_title(table, runs)
    assert "Published: infinity_2b / infinity_8b, MS-COCO 2017 validation, batch 8; " in header
    assert "measured: infinity_tiny, scenes, n = 96, batch 16 " in header + " "


def test_methods_that_no_paper_has_stand_before_those_of_their_budget() -> None:
    runs = [
        run(method, budget) for budget in (0.1, 0.2, 0.3) for method in ("heatkv", "random", "first_scales")
    ]
    rows = summary.make_rows(published.find("heatkv_table1"), runs)
    assert [(row["method"], row["budget"]) for row in rows] == [
        ("first_scales", "0.2"), ("random", "0.2"), ("heatkv", "0.2"), ("first_scales", "0.1"),
        ("random", "0.1"), ("heatkv", "0.1"),
    ]  # fmt: skip
    assert [texts(row)["psnr, infinity_2b / infinity_8b"] for row in rows] == [
        "-", "-", "28.43 / 27.44", "-", "-", "25.40 / 24.41",
    ]  # fmt: skip
    assert all(texts(row)["psnr"] == "21.00 ±1.00" for row in rows)


def test_methods_that_no_paper_has_stand_beside_settings_that_they_lack() -> None:
    runs = [run("heatkv", 0.1, sinks=2), run("random", 0.1, sinks=2), run("first_scales", 0.1)]
    rows = summary.make_rows(published.find("heatkv_table3b"), runs)
    assert [(row["method"], row["sinks"]) for row in rows] == [
        ("first_scales", "-"),
        ("random", "2"),
        ("heatkv", "2"),
    ]


def test_methods_that_no_paper_has_stand_beside_what_a_method_held() -> None:
    held = run("scale_groups", 1, method__remove="local")
    held = replace(held, memory=replace(held.memory, peak_tokens=2293))  # of 6425
    table = published.find("ams_kv_table1")
    other = run("random", 0.3569, model="var_tiny")
    rows = summary.make_rows(table, [held, run("random", 0.3569), run("random", 0.6627), other])
    assert [(row["method"], row["budget"]) for row in rows] == [("random", "0.3569"), ("scale_groups", "1")]
    assert summary.make_rows(table, [run("random", 0.3569)]) == []
    counted = run("random", 0.3569, noise="counter")
    assert [row["method"] for row in summary.make_rows(table, [held, counted])] == ["scale_groups"]


def test_a_random_choice_stands_beside_full_caches_whatever_it_holds() -> None:
    target = "kvbench.prompts.benchmarks.GenEval"
    runs = [run(m, b, "infinity_2b", prompts___target_=target) for m, b in (("full", 1), ("random", 0.1))]
    rows = summary.make_rows(published.find("reproduction"), runs)
    assert [row["method"] for row in rows] == ["random", "full"]


def test_budget_that_was_left_unused_is_marked_and_the_mark_explained() -> None:
    table, one = published.find("heatkv_table1"), run("heatkv", 0.1)
    underused, full = (replace(one, memory=replace(one.memory, least_share=share)) for share in (0.969, 0.97))
    assert [row["budget"] for row in summary.make_rows(table, [underused, full])] == ["0.1!", "0.1"]
    told = {len(runs): summary.make_section(table, runs) for runs in ([full], [full, underused])}
    assert all(section is not None for section in told.values())
    assert ["!: less than 97 %" in section.caption for section in told.values() if section] == [False, True]


def test_the_papers_own_model_stands_beside_itself_only() -> None:
    [row] = summary.make_rows(published.find("heatkv_table1"), [run("heatkv", 650 / 6425, "infinity_8b")])
    assert row["psnr, infinity_8b"] == "24.41"
    assert "model" not in row
    both = summary.make_rows(
        published.find("heatkv_table1"), [run("heatkv", 0.1, "infinity_8b"), run("heatkv", 0.1)]
    )
    assert [row["model"] for row in both] == ["infinity_8b", "infinity_tiny"]
    assert both[1]["psnr, infinity_2b / infinity_8b"] == "25.40 / 24.41"


def test_random_weights_are_not_the_papers_model() -> None:
    one = run("heatkv", 0.1, "infinity_8b", model__weights="random")
    table = published.find("heatkv_table1")
    assert "measured: infinity_8b (random weights), scenes" in summary.make_title(table, [one])
    [row] = summary.make_rows(table, [one])
    assert row["psnr, infinity_2b / infinity_8b"] == "25.40 / 24.41"


def test_scores_of_another_detector_keep_its_name() -> None:
    [row] = summary.make_rows(published.find("heatkv_table4"), [run("heatkv", 0.1)])
    assert row["geneval/position, infinity_2b / infinity_8b"] == "0.28 / 0.55"
    assert texts(row)["geneval[scenes]/position"] == "0.800"
    assert "geneval/position" not in row
    assert "geneval" not in row


def test_full_caches_stand_beside_the_numbers_of_their_own_benchmark() -> None:
    table = published.find("reproduction")
    scores = {
        "geneval[official]": Metric(0.7, "higher", digits=3),
        "geneval[official-rewritten]": Metric(0.74, "higher", digits=3),
        "imagereward": Metric(0.5, "higher", digits=3),
    }
    target = "kvbench.prompts.benchmarks.GenEval"
    plain = replace(run("full", 1, "infinity_2b", prompts___target_=target), metrics=scores)
    [row] = summary.make_rows(table, [plain])
    assert texts(row)["geneval[official]"] == "0.700"
    assert row["geneval[official], published"] == (
        "0.69 (Infinity README), 0.680 (HeatKV), .68 (HACK), 0.711 (AMS-KV), 0.68276 (Infinity#16)"
    )
    assert row["geneval[official-rewritten], published"] == (
        "0.73 (Infinity README), 0.73 (Infinity paper), 0.72601 (Infinity#42)"
    )
    assert row["imagereward, published"] == "-"
    assert "infinity_2b (Infinity README) / infinity_2b (Infinity paper) / infinity_2b (HeatKV)" in (
        summary.make_title(table, [plain])
    )
    assert summary.make_rows(table, [run("heatkv", 0.1, "infinity_2b", prompts___target_=target)]) == []
    assert summary.make_rows(table, [run("full", 1, "infinity_2b")]) == []  # prompts of no benchmark


def test_full_caches_of_classes_and_texts_stand_beside_theirs_with_the_settings_they_drew_with() -> None:
    fid = {"fid_adm": Metric(2.05, "lower", digits=2), "is": Metric(310.0, "higher", digits=1)}
    classes = {"prompts___target_": "kvbench.prompts.imagenet.ImageNet"}
    runs = [
        replace(run("full", 1, "var_d30", model__sampling={"cfg": cfg, "top_k": k}, **classes), metrics=fid)
        for cfg, k in ((1.5, 900), (2.0, 600))
    ]
    rows = summary.make_rows(published.find("reproduction_classes"), runs)
    assert [(row["model.sampling.cfg"], row["model.sampling.top_k"]) for row in rows] == [
        ("1.5", "900"),
        ("2.0", "600"),
    ]
    assert texts(rows[0])["fid_adm"] == "2.05"
    assert rows[0]["fid_adm, published"] == (
        "1.97 (VAR README), 1.92 (VAR paper), 2.07 (AMS-KV 2.0), 2.03 (AMS-KV 1.5), 1.96 (HACK++)"
    )
    smaller = run("full", 1, "var_d16", model__sampling={"cfg": 1.5, "top_k": 900}, **classes)
    table, two = published.find("reproduction_classes"), [replace(smaller, metrics=fid), runs[0]]
    assert [(row["model"], row["is, published"]) for row in summary.make_rows(table, two)] == [
        ("var_d16", "274.4 (VAR paper), 281.71 (VAR#83)"),
        ("var_d30", "323.1 (VAR paper), 336.15 (AMS-KV 2.0), 305.19 (AMS-KV 1.5), 302.23 (HACK++)"),
    ]
    for other in ({"model": "var_tiny"}, {"model": "var_d30", "model__weights": "random"}):
        assert summary.make_rows(table, [run("full", 1, **other, **classes)]) == []  # no model of the table
    solved = {"accuracy": Metric(0.75, "higher", digits=3)}
    target = {"prompts___target_": "kvbench.prompts.problems.Aime25"}
    own = run("full", 1, "qwen3_8b", model__max_tokens=38912, model__sampling={"temperature": 0.6}, **target)
    [row] = summary.make_rows(published.find("reproduction_texts"), [replace(own, metrics=solved)])
    assert (row["model.max_tokens"], texts(row)["accuracy"]) == ("38912", "0.750")
    assert row["accuracy, published"] == "0.673 (Qwen3 report), 0.633 (Hard-KV), 0.408 (TriAttention)"
