"""The papers' tables: what was typed in is sound, and runs find their rows."""

import re

import pytest

from kvbench.core.config import ConfigError
from kvbench.report.figures.lines import CURVES
from kvbench.report.papers import published
from tests.report.test_published_comparison import parse_run
from tests.support.published_rows import rows_of

PRINTED = """
heatkv_table1 | infinity_2b | method=heatkv budget=0.04 | psnr | 22.14
heatkv_table1 | infinity_8b | method=snapkv budget=0.2 | lpips | 0.102
heatkv_table2 | infinity_2b | method=scalekv budget=0.1 | hpsv2.1 | 30.34
heatkv_table3a | infinity_2b | calibrate.count=2 | lpips | 0.0735
heatkv_table3b | infinity_2b | sinks=6 | psnr | 25.00
heatkv_table3c | infinity_2b | method=binary_heatkv_naive | fid_paired_clean | 2.21
heatkv_table4 | infinity_8b | method=hack budget=0.1 | geneval/color_attr | 0.72
ams_kv_table1 | var_d30 | method.remove=local | is | 295.14
ams_kv_table2 | var_d30 | method.placement=similarity | fid_adm | 3.37
ams_kv_table3 | var_d36 (batch 25) | method=ams_kv | saving % | 71.29
ams_kv_table4 | infinity_2b | method=ams_kv | geneval | 0.714
ams_kv_table5 | var_d30 | method=h2o | is | 182.8
ams_kv_table6 | var_d30 | method=full latency.batch=128 | images/s | OOM
ams_kv_table7 | var_d30 | method.condensed=1 | recall | 0.57
ams_kv_table8 | var_d30 | method=ams_kv | fid_adm[landscape] | 57.49
ams_kv_table9 | var_d30 | method=sta | ssim | 0.496
headkv_table2 | llamagen_xl | method=linear_ar budget=1/8 | is | 282.91
headkv_table3 | llamagen_xl | method=rkv budget=1/6 | fid_adm | 2.77
headkv_table4 | llamagen_xl | method=headkv budget=1/6 | memory GB | 12.34
hackpp_table1 | infinity_2b | method=hackpp/read_30 budget=0.01 | imagereward | .934
hackpp_table1 | infinity_8b | method=meda | fid_mjhq_clean | 11.56
hackpp_table1 | hart | method=hackpp/read_30 | cache GiB | .61
hackpp_table2 | var_d30 | method=lookm | is | 116.70
hackpp_table2 | var_d24 | method=hackpp/read_50 | fid_adm | 2.21
hackpp_table3 | infinity_2b | method=hackpp | hpsv2.1 | 30.53
hackpp_table4 | infinity_2b | method.tau=0.0 method.structural=attention | imagereward | .892
hackpp_table5 | infinity_2b | method.observed=8 | imagereward | .920
hackpp_fig14 | infinity_2b | method.tau=2.0 | imagereward | .942
triattention_aime | qwen3_8b (aime24) | budget=4096 | accuracy | 0.546
triattention_aime | qwen3_8b (aime25) | method=rkv/text | accuracy | 0.175
triattention_math | qwen3_8b (math500) | method=snapkv/text method.sinks=0 | accuracy | 0.492
random_attention_table2 | qwen3_4b (math500) | method=random_attention method.sinks=1 | accuracy | 0.874
random_attention_table2 | phi_4_reasoning (gpqa_diamond) | method=vase method.sinks=0 | accuracy | 0.562
random_attention_table3 | unnamed | method=rkv/half | retrieved | 0.836
ssd_table1 | janus_pro_1b (every 24 tokens) | method=ssd | dpg[official] | 82.53
hack_table1 | var_d30 | method=hack | is | 299.98
hack_table2 | infinity_8b | method=hack | geneval | .82
hack_table3 | infinity_8b | method.observed=4096 | imagereward | 1.045
"""
"""Cells as papers print them: table, model, settings, metric, cell."""


@pytest.mark.parametrize("line", PRINTED.strip().splitlines())
def test_cells_are_those_that_were_printed(line: str) -> None:
    table, label, settings, metric, printed = line.split(" | ")
    where = dict(word.split("=") for word in settings.split())
    rows = published.find(table).models[label]
    found = [
        row
        for row in rows
        if all(value in row.where[key] for key, value in where.items() if key in row.where)
    ]
    found = [row for row in found if all(key in row.where for key in where)]
    assert [row.cells[metric] for row in found] == [printed]


def test_tables_have_every_row() -> None:
    counts = {name: [len(rows) for rows in table.models.values()] for name, table in published.load().items()}
    assert counts["heatkv_table1"] == counts["heatkv_table2"] == counts["heatkv_table4"] == [16, 16]
    assert [counts[f"heatkv_table3{part}"] for part in "abc"] == [[4], [6], [3]]
    assert [sum(counts[f"ams_kv_table{i}"]) for i in range(1, 10)] == [4, 2, 8, 2, 4, 10, 4, 2, 3]
    assert [sum(counts[f"headkv_table{i}"]) for i in (2, 3, 4)] == [7, 11, 13]
    assert [counts[f"hackpp_table{i}"] for i in range(1, 6)] == [[14, 12, 6], [14, 12], [4], [6], [6]]
    assert (counts["random_attention_table2"], counts["random_attention_table3"]) == ([13, 11, 11, 11], [8])
    assert [counts["hackpp_fig14"], *(counts[f"hack_table{i}"] for i in (1, 2, 3))] == [
        [7], [5], [4, 3, 4], [2, 2],
    ]  # fmt: skip


def test_accuracies_of_triattention_are_whole_texts() -> None:
    """They are shares of 240 texts of AIME and of 500 problems of MATH-500, rounded to three digits."""
    counts = {"triattention_aime": 240, "triattention_math": 500}
    for name, texts_ in counts.items():
        rows = [row for rows in published.find(name).models.values() for row in rows]
        printed = [row.cells["accuracy"] for row in rows if row.cells["accuracy"] is not None]
        assert printed
        for cell in printed:
            assert f"{round(float(cell) * texts_) / texts_:.3f}" == cell, (name, cell)


def test_models_of_a_table_share_its_rows() -> None:
    for name in ("heatkv_table1", "heatkv_table2", "heatkv_table4"):
        table = published.find(name)
        assert len(table.rows) == 16
        cells = [cell for rows in table.models.values() for row in rows for cell in row.cells.values()]
        assert (None in cells) == (name == "heatkv_table1")  # the full cache is compared with nothing there


FOUND = """
heatkv_table1 | heatkv 0.1 | budget=0.1
heatkv_table1 | heatkv 650/6425 | budget=0.1
heatkv_table1 | heatkv 265/6425 | budget=0.04
heatkv_table1 | heatkv 1300/6425 | budget=0.2
heatkv_table1 | heatkv 0.106 | -
heatkv_table1 | heatkv 0.03 | -
heatkv_table1 | heatkv 0.1 infinity_2b | budget=0.1
heatkv_table1 | heatkv 0.1 infinity_2b memory.budget_unit=bytes | -
heatkv_table3b | heatkv 0.1 sinks=3 | sinks=3
heatkv_table3b | scalekv 0.1 sinks=3 | -
heatkv_table3b | heatkv 0.2 sinks=3 | -
heatkv_table3b | heatkv 0.1 | -
ams_kv_table9 | sta 0.4 | method=sta/streaming_llm
ams_kv_table9 | streaming_llm 0.4 | method=sta/streaming_llm
ams_kv_table1 | scale_groups 1 method.remove=local | method.remove=local
ams_kv_table7 | full 1 | method=full
ams_kv_table6 | ams_kv 1 | latency.batch=16
triattention_aime | rkv/text 0.06178 qwen3_8b method.sinks=0 | method.sinks=0
triattention_aime | rkv/text 0.06178 qwen3_8b method.sinks=1 | method.sinks=1
random_attention_table2 | vase/attn 1088/33216 qwen3_4b method.sinks=0 | method.sinks=0
random_attention_table2 | vase/attn 1088/33216 qwen3_4b method.sinks=1 | method.sinks=1
random_attention_table2 | random 200/938 reasoner_tiny method.sinks=0 | method.sinks=0
random_attention_table2 | random 200/938 reasoner_tiny method.sinks=1 | method.sinks=1
hackpp_table1 | hackpp 3156/6425 infinity_2b | -
hackpp_table1 | hackpp 1052/6425 infinity_2b | budget=0.1 method=hackpp
hackpp_table1 | hackpp 105/6425 infinity_2b | budget=0.01 method=hackpp
hackpp_table1 | hackpp 120/255 | -
hackpp_table1 | hackpp 40/255 | budget=0.1 method=hackpp
hackpp_table1 | hackpp 4/255 | budget=0.01 method=hackpp
hackpp_table1 | hackpp/read_30 40/255 method.attention_budget=0.3 | budget=0.1 method=hackpp/read_30
"""
"""Tables, runs and settings of the one row that they find: a nominal budget within 5 %, shares of all tokens among
budgets of what is cached (10521 and 6425 tokens, 399 and 255), aliases of methods, prompts that stay."""


@pytest.mark.parametrize("line", FOUND.strip().splitlines())
def test_a_run_finds_its_row(line: str) -> None:
    name, words, wanted = line.split(" | ")
    found = rows_of(published.find(name), parse_run(words))
    if wanted == "-":
        assert found == []
        return
    [where] = [{key: "/".join(values) for key, values in one.items()} for one in found]
    assert dict(word.split("=") for word in wanted.split()).items() <= where.items()


def test_every_number_of_several_sources_has_a_source_that_can_be_looked_up() -> None:
    several = [table for table in published.load().values() if table.sources]
    assert {table.name for table in several} == {
        "reproduction", "reproduction_classes", "reproduction_texts",
    }  # fmt: skip
    for table in several:
        assert {*table.sources} == {*map(published.prompts_of, table.models)}
        for label in table.models:
            source = table.sources[published.prompts_of(label)]
            assert re.match(
                r"arXiv:\d{4}\.\d{5}|README of [\w-]+/\w|[\w-]+/[\w.-]+#\d+, |the baseline of", source
            )


def test_what_the_summary_reads_is_in_the_file() -> None:
    for table in published.load().values():
        assert {metric for metric in table.metrics if metric.startswith(("cache", "images"))} <= set(
            published.COSTS
        )
        assert len(set(table.metrics)) == len(table.metrics)
        assert table.figure in (None, "fidelity", "stability", *CURVES)
        for rows in table.models.values():
            assert len({str(row.where) for row in rows}) == len(rows)
            assert all(cell is None or isinstance(cell, str) for row in rows for cell in row.cells.values())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("source: s, ", "", r"t: .*missing .*'source'"),
        ("title: t", "title: t, colour: red", r"t: .*unexpected .*'colour'"),
        ("[full, 1]", "[full, 1, 2]", "t: m, row 0: needs 1 settings and 1 cells"),
    ],
)
def test_a_wrong_file_is_told(old: str, new: str, message: str) -> None:
    good = "t: {source: s, title: t, data: d, keys: [method], metrics: [psnr], models: {m: [[full, 1]]}}"
    assert published.parse(good)["t"].models["m"][0].cells == {"psnr": "1"}
    with pytest.raises(ConfigError, match=rf"published\.yaml: {message}"):
        published.parse(good.replace(old, new))


def test_an_unknown_table_is_told() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^published=table9: no such table; did you mean ams_kv_table9\? choose from heatkv_table1, ",
    ):
        published.find("table9")
