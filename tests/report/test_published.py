"""The papers' tables: what was typed in is sound, and runs find their rows."""

import re
from dataclasses import replace
from fractions import Fraction

import pytest
import yaml

from kvbench.core.config import ConfigError
from kvbench.report.figures.lines import CURVES
from kvbench.report.papers import published
from kvbench.runs.record.results import Results
from tests.report.test_published_comparison import parse_run
from tests.support.places import ROOT
from tests.support.small_models import configured

PRINTED = """
heatkv_table1 | infinity_2b | method=heatkv budget=0.04 | psnr | 22.14
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
ams_kv_table8 | var_d30 | method=ams_kv | fid_adm[landscape] | 57.49
ams_kv_table9 | var_d30 | method=sta | ssim | 0.496
headkv_table3 | llamagen_xl | method=rkv budget=1/6 | fid_adm | 2.77
headkv_table4 | llamagen_xl | method=headkv budget=1/6 | memory GB | 12.34
hackpp_table1 | infinity_2b | method=hackpp/read_30 budget=0.01 | imagereward | .934
hackpp_table2 | var_d24 | method=hackpp/read_50 | fid_adm | 2.21
hackpp_table4 | infinity_2b | method.tau=0.0 method.structural=attention | imagereward | .892
hackpp_table5 | infinity_2b | method.observed=8 | imagereward | .920
hackpp_fig14 | infinity_2b | method.tau=2.0 | imagereward | .942
triattention_aime | qwen3_8b (aime24) | budget=4096 | accuracy | 0.546
triattention_math | qwen3_8b (math500) | method=snapkv/text method.sinks=0 | accuracy | 0.492
random_attention_table2 | phi_4_reasoning (gpqa_diamond) | method=vase method.sinks=0 | accuracy | 0.562
random_attention_table3 | unnamed | method=rkv/half | retrieved | 0.836
ssd_table1 | janus_pro_1b (every 24 tokens) | method=ssd | dpg[official] | 82.53
hack_table1 | var_d30 | method=hack | is | 299.98
hack_table2 | infinity_8b | method=hack | geneval | .82
hack_table3 | infinity_8b | method.observed=4096 | imagereward | 1.045
hard_kv_table1 | qwen3_8b (aime24) | method.selector=vanilla method.select=top_k budget=1024 | accuracy | 0.100
hard_kv_table2 | qwen3_8b (aime25) | method.selector=snapkv method.p=0.8 | generated_tokens | 24229.6
hard_kv_table3 | qwen3_8b (aime24, upper block) | method=full cuda_graph=true | tokens/s | 477
hard_kv_table4 | qwen3_4b (aime25) | method.selector=snapkv method.select=top_k budget=4096 | accuracy | 0.433
hard_kv_table5 | qwen3_4b (aime24) | method.selector=snapkv method.p=0.9 | accuracy | 0.667
hard_kv_table6 | qwen3_32b (umath) | method.selector=rkv method.calibration=bisection | accuracy | 0.520
"""
"""Cells as papers print them: table, model, settings, metric, cell."""


def test_cells_are_those_that_were_printed() -> None:
    for line in PRINTED.strip().splitlines():
        table, label, settings, metric, printed = line.split(" | ")
        where = dict(word.split("=") for word in settings.split())
        rows = published.find(table).models[label]
        found = [row for row in rows if all(value in row.where.get(key, ()) for key, value in where.items())]
        assert [row.cells[metric] for row in found] == [printed], line


FOUND = """
heatkv_table1 | heatkv 0.1 | budget=0.1
heatkv_table1 | heatkv 650/6425 | budget=0.1
heatkv_table1 | heatkv 1300/6425 | budget=0.2
heatkv_table1 | heatkv 0.106 | -
heatkv_table1 | heatkv 0.1 infinity_2b memory.budget_unit=bytes | -
heatkv_table3b | heatkv 0.1 sinks=3 | sinks=3
heatkv_table3b | scalekv 0.1 sinks=3 | -
heatkv_table3b | heatkv 0.2 sinks=3 | -
heatkv_table3b | heatkv 0.1 | -
ams_kv_table9 | streaming_llm 0.4 | method=sta/streaming_llm
ams_kv_table1 | scale_groups 1 method.remove=local | method.remove=local
ams_kv_table7 | full 1 | method=full
ams_kv_table6 | ams_kv 1 | latency.batch=16
triattention_aime | rkv/text 0.06178 qwen3_8b method.sinks=0 | method.sinks=0
triattention_aime | rkv/text 0.06178 qwen3_8b method.sinks=1 | method.sinks=1
random_attention_table2 | vase/attn 1088/33216 qwen3_4b method.sinks=0 | method.sinks=0
random_attention_table2 | random 200/938 reasoner_tiny method.sinks=0 | method.sinks=0
hackpp_table1 | hackpp 3156/6425 infinity_2b | -
hackpp_table1 | hackpp 1052/6425 infinity_2b | budget=0.1 method=hackpp
hackpp_table1 | hackpp 40/255 | budget=0.1 method=hackpp
hackpp_table1 | hackpp/read_30 40/255 method.attention_budget=0.3 | budget=0.1 method=hackpp/read_30
headkv_table2 | headkv 145/553 llamagen_xl | budget=1/4
headkv_table3 | headkv 97/553 llamagen_xl | budget=1/6
headkv_table4 | headkv 73/553 llamagen_xl | budget=1/8
hard_kv_table1 | full 1 qwen3_8b | method=full
hard_kv_table1 | hard_kv 1024/33152 qwen3_8b RKV_TOP_K | budget=1024 method.selector=rkv method.select=top_k
hard_kv_table2 | hard_kv 4096/33152 qwen3_8b SNAPKV_BISECTED method.p=0.8 | method.p=0.8
hard_kv_table3 | hard_kv 4096/33152 qwen3_8b SNAPKV_BISECTED cuda_graph=false | method.selector=snapkv
hard_kv_table6 | hard_kv 3000/33152 qwen3_32b SNAPKV_BISECTED | method.selector=snapkv
"""
"""Tables, runs and settings of the one row that they find: a nominal budget within 5 %, shares of all tokens among
budgets of what is cached (10521 and 6425 tokens, 399 and 255), image tokens and the class (577 and 553 tokens),
tokens per head (33152: 512 of a prompt and 32768 less the last chunk of 128), aliases of methods, prompts that stay."""


def find_rows(name: str, run: Results) -> list[dict[str, str]]:
    """Settings of the rows of a table that a run belongs to."""
    table = published.find(name)
    wheres = [table.rows[place] for place in table.find_rows(run)]
    return [{key: "/".join(values) for key, values in where.items()} for where in wheres]


def test_a_run_finds_its_row() -> None:
    for line in FOUND.strip().splitlines():
        name, words, wanted = line.split(" | ")
        found = find_rows(name, parse_run(words))
        assert len(found) == (wanted != "-"), line
        settings = dict(word.split("=") for word in wanted.split() if wanted != "-")
        assert all(settings.items() <= one.items() for one in found), line
    for told, recorded in (("on", "true"), ("off: device=cpu has no CUDA graphs", "false")):
        one = replace(parse_run("full 1 qwen3_8b cuda_graph=auto"), provenance={"cuda_graph": told})
        assert [row["cuda_graph"] for row in find_rows("hard_kv_table3", one)] == [recorded]


def test_choices_of_hard_kv_are_selectors_with_one_way_to_select() -> None:
    ways = {"top_k": ("top_k", "none"), "top_p": ("top_p", "none"), "calibrated": ("top_p", "bisection")}
    folder = ROOT / "conf" / "method" / "hard_kv"
    found = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yaml")}
    assert {name: (one["selector"], one["select"], one["calibration"]) for name, one in found.items()} == {
        f"{selector}_{way}": (selector, *own)
        for selector in ("vanilla", "snapkv", "rkv")
        for way, own in ways.items()
    }


def test_budgets_follow_from_the_models_shapes() -> None:
    """Hard-KV's are tokens per head, HeadKV's shares of image tokens and the class."""
    for name, scale in (("qwen3_8b", 1.0), ("reasoner_tiny", 100 / 1024)):
        spec = configured(f"model={name}").spec
        for count, share in published.find("hard_kv_table1").budgets[name].items():
            assert float(share) == pytest.approx(round(int(count) * scale) / spec.cached_length, abs=6e-6)
    for name in ("llamagen_xl", "janus_pro_7b", "lumina_mgpt_7b_768", "llamagen_tiny"):
        spec = configured(f"model={name}").spec
        for share, printed in published.find("headkv_table1").budgets[name].items():
            tokens = int(Fraction(share) * spec.drawn_tokens) + spec.lengths[0]
            assert float(printed) == pytest.approx(tokens / spec.cached_length, abs=5e-5)


def test_tables_of_the_file_are_sound() -> None:
    """Every number of several sources has one that can be looked up, and rows differ."""
    for table in published.load().values():
        costs = {metric for metric in table.metrics if metric.startswith(("cache", "images"))}
        assert costs <= set(published.COSTS)
        assert len(set(table.metrics)) == len(table.metrics)
        assert table.figure in (None, "fidelity", "stability", *CURVES)
        for rows in table.models.values():
            assert len({str(row.where) for row in rows}) == len(rows)
        if table.sources:
            assert {*table.sources} == {*map(published.prompts_of, table.models)}
            source = r"arXiv:\d{4}\.\d{5}|README of [\w-]+/\w|[\w-]+/[\w.-]+#\d+, |the baseline of"
            assert all(re.match(source, one) for one in table.sources.values())


def test_an_unknown_table_is_told() -> None:
    with pytest.raises(ConfigError, match=r"^published=table9: .* did you mean ams_kv_table9\?"):
        published.find("table9")
