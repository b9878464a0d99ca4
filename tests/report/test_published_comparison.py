"""Measured runs and timings stand beside the rows that papers published: golden texts, a line for each case."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec, next_scale
from kvbench.engine.memory import cache_bytes, paper_mib
from kvbench.eval.protocol.scores import Metric
from kvbench.report.papers import comparison, speed
from kvbench.report.papers.by_metric import show_by_metric
from kvbench.report.papers.published import find
from kvbench.report.tables import format_markdown
from kvbench.report.timings import Timing, read_timings
from kvbench.runs.record.results import Results
from tests.support.results import LPIPS, PSNR, made_up, make_profile, make_timing, printed
from tests.support.texts import check_text

METRICS = {
    "psnr": replace(PSNR, value=21.0, ci95=(20.0, 22.0)),
    "lpips": replace(LPIPS, status="skipped", reason="weights missing"),
    "lpips_scenes": Metric(0.5, "lower", ci95=(0.4, 0.6)),
    "geneval[scenes]": Metric(0.9, "higher", digits=3),
    "geneval[scenes]/position": Metric(0.8, "higher", digits=3, detail=True),
}
OFFICIAL = {
    "geneval[official]": Metric(0.7, "higher", digits=3),
    "geneval[official-rewritten]": Metric(0.74, "higher", digits=3),
    "imagereward": Metric(0.5, "higher", digits=3),
    "fid_adm": Metric(2.05, "lower", digits=2),
    "is": Metric(310.0, "higher", digits=1),
    "accuracy": Metric(0.75, "higher", digits=3),
}
PROMPTS = {
    name: f"prompts._target_=kvbench.prompts.{target}"
    for name, target in {
        "GENEVAL": "benchmarks.GenEval",
        "CLASSES": "imagenet.ImageNet",
        "AIME24": "problems.Aime24",
        "AIME25": "problems.Aime25",
        "UMATH": "problems.UMath",
        "MATH500": "problems.Math500",
        "TINY": "math_tiny.MathTiny",
    }.items()
}
CASES = """
measured beside published, under its own name | heatkv_table1 | heatkv 0.1; full 1; newest 0.1
methods without a paper come first at their budget | heatkv_table1 | \
    heatkv 0.1; random 0.1; first_scales 0.1; heatkv 0.2; random 0.2; first_scales 0.2; heatkv 0.3; random 0.3
methods that no paper has beside what a method held, 2293 of 6425 tokens | ams_kv_table1 | \
    scale_groups 1 method.remove=local memory.peak_tokens=2293; random 0.3569; random 0.6627; random 0.3569 var_tiny
two numbers of samples | heatkv_table1 | heatkv 0.1; heatkv 0.2 n=16
another noise | ams_kv_table1 | \
    scale_groups 1 method.remove=local memory.peak_tokens=2293; random 0.3569 noise=counter
a random choice beside full caches whatever it holds | reproduction | \
    full 1 infinity_2b GENEVAL; random 0.1 infinity_2b GENEVAL
one that was left unused is marked | heatkv_table1 | \
    heatkv 0.1 memory.least_share=0.97; heatkv 0.1 memory.least_share=0.969
the paper's own model | heatkv_table1 | heatkv 650/6425 infinity_8b
random weights | heatkv_table1 | heatkv 0.1 infinity_8b model.weights=random
full caches of a benchmark | reproduction | full 1 infinity_2b GENEVAL OFFICIAL
no full cache | reproduction | heatkv 0.1 infinity_2b GENEVAL
prompts of no benchmark | reproduction | full 1 infinity_2b
settings of classes | reproduction_classes | \
    full 1 var_d30 CLASSES OFFICIAL model.sampling={"cfg":1.5,"top_k":900}; \
    full 1 var_d30 CLASSES OFFICIAL model.sampling={"cfg":2.0,"top_k":600}
no model of the table | reproduction_classes | full 1 var_tiny CLASSES
what the paper lacks | hard_kv_table1 | \
    random 0.2 reasoner_tiny TINY; streaming_llm 0.2 reasoner_tiny TINY; hard_kv 0.2 reasoner_tiny TINY RKV_TOP_P
two sets of prompts | hard_kv_table1 | full 1 qwen3_8b AIME25; full 1 qwen3_8b UMATH
prompts that the paper lacks | hard_kv_table1 | full 1 qwen3_8b MATH500
the released program's selection | hard_kv_table1 | \
    hard_kv 1024/33152 qwen3_8b AIME24 method.selector=snapkv method.select=official_rewrite method.calibration=official
two blocks | hard_kv_table3 | full 1 qwen3_8b UMATH cuda_graph=false
"""
"""Title, published table, and runs: method, budget, model, and settings by dotted path."""
SELECTORS = {
    "RKV_TOP_K": "method.selector=rkv method.select=top_k method.calibration=none",
    "RKV_TOP_P": "method.selector=rkv method.select=top_p method.calibration=none",
    "SNAPKV_BISECTED": "method.selector=snapkv method.select=top_p method.calibration=bisection",
}


def parse_run(text: str) -> Results:
    for name, words in (PROMPTS | SELECTORS).items():
        text = text.replace(name, words)
    method, budget, *others = text.split()
    model = next((word for word in others if "=" not in word and word != "OFFICIAL"), "infinity_tiny")
    config: dict[str, Any] = {
        "model": {"name": model},
        "prompts": {"_target_": "kvbench.prompts.base.Scenes"},
        "method": {},
    }
    memory, count = {}, 96
    for path, value in (word.split("=", 1) for word in others if "=" in word):
        group, _, name = path.partition(".")
        if group == "memory":
            memory[name] = yaml.safe_load(value)
        elif name:
            config.setdefault(group, {})[name] = yaml.safe_load(value)
        elif group == "n":
            count = int(value)
        else:
            config[group] = yaml.safe_load(value)
    metrics = OFFICIAL if "OFFICIAL" in others else METRICS
    one = made_up(method, float(Fraction(budget)), metrics, tokens=6425, config=config, n=count)
    return replace(one, memory=replace(one.memory, **memory))


def test_runs_stand_beside_published_rows() -> None:
    texts = []
    for line in CASES.replace("\\\n", "").strip().splitlines():
        title, name, words = line.split(" | ")
        table, runs = find(name), [parse_run(one) for one in words.split(";")]
        section = comparison.make_section(table, runs)
        texts += [f"## {title}\n\n{comparison.make_title(table, runs)}\n"]
        rows = comparison.make_rows(table, runs)
        texts += [format_markdown(rows) if rows else "no row\n", f"{section and section.caption}\n"]
    check_text("published_comparison.txt", "\n".join(texts))


def test_numbers_of_several_tables_metric_by_metric(tmp_path: Path) -> None:
    """A number stands beside every table that prints it; what cannot be compared is named with the reason."""
    metrics = {
        "psnr": METRICS["psnr"],
        "hpsv2.1": Metric(None, "higher", status="skipped", reason="weights missing"),
        "geneval[mask2former-hf]": Metric(0.7, "higher", ci95=(0.6, 0.8), digits=2),
    }
    tables = ("heatkv_table1", "heatkv_table2", "ams_kv_text", "reproduction")
    texts = []
    for model in ("infinity_2b", "infinity_tiny"):
        words = ("full 1", "heatkv 0.1", "heatkv 0.2", "pricekv 0.1")
        runs = [replace(parse_run(f"{one} {model} GENEVAL"), metrics=metrics) for one in words]
        timed = {"batch": 8, "model": model}
        full = make_timing("full", 1.0, seconds=4.0, decode=2.4, reserved=32 * 10**9, **timed)
        heatkv = [
            make_timing("heatkv", share, seconds=3.2, decode=decode, reserved=8 * 10**9, **timed)
            for share, decode in ((0.2, 1.6), (0.1, 2.4))
        ]
        texts.append(printed(200, show_by_metric, tables, runs, [full, *heatkv], tmp_path))
        texts.append((tmp_path / f"report-published-{model}.md").read_text())
    check_text("published_by_metric.txt", "\n".join(texts).replace(str(tmp_path), ""))


PROFILE = make_profile("heatkv", 0.1, model="infinity_2b", config={"method": {"sinks": 3}, "seed": 5})
TURNS = [
    Timing(PROFILE, {**make_timing(name, 1.0, seconds=seconds, batch=2).row, "cache": name})
    for name, seconds in (("heatkv", 3.0), ("full", 4.0))
]
"""A method and a full cache that were timed in turns, in one file."""
TIMED: Mapping[str, tuple[str | None, Sequence[Timing]]] = {
    "batch 10: full 5 s, of which 1 s decodes, 8 GB; HeadKV 3 s, 1 s, 6 GB": (
        "headkv_table4",
        [
            make_timing("headkv", 0.2622, batch=10, seconds=3.0, decode=1.0, reserved=6_000_000_000),
            make_timing("full", 1.0, batch=10, seconds=5.0, decode=1.0, reserved=8_000_000_000),
        ],
    ),
    "a CPU, and a batch that does not fit": (
        "ams_kv_table6",
        [
            make_timing("ams_kv", 1.0, model="var_d30", batch=128, largest=300),
            make_timing("full", 1.0, model="var_d30", batch=128, status="out of memory"),
        ],
    ),
    "the full cache of the same file": (
        "heatkv_fig5_speed",
        [make_timing("full", 1.0, model="infinity_2b", batch=2, seconds=100.0), *TURNS],
    ),
    "without a table every timing is a row": (
        None,
        [make_timing("heatkv", 0.1, batch=batch) for batch in (4, 2)],
    ),
}


def test_timings_stand_beside_published_ones(tmp_path: Path) -> None:
    """Files are read once and in order."""
    texts = []
    for what, (name, timings) in TIMED.items():
        files: dict[Path, dict[str, Any]] = {}
        for number, one in enumerate(timings):
            same = next((path for path, file in files.items() if file["profile"] is one.profile), None)
            own = files.setdefault(same or tmp_path / f"{number}.json", {"profile": one.profile, "rows": []})
            own["rows"].append(one.row)
        for path, file in files.items():
            path.write_text(json.dumps({**file["profile"], "rows": file["rows"]}))
        paths = [*files, *files]
        texts += [f"## {what}\n", printed(200, speed.show_speed, name, paths, tmp_path)]
    check_text("published_speed.txt", "\n".join(texts).replace(str(tmp_path), ""))


def test_timings_tell_the_cache_of_the_paper_and_their_settings() -> None:
    """Half precision is assumed; a full cache that was timed in turns has no setting of the method."""
    spec = ModelSpec("x", 3, 2, 8, next_scale([(1, 1), (2, 2), (4, 4)]))
    for dtype, item in (("float32", 4), ("bfloat16", 2)):
        one = make_timing("full", 1.0, batch=16, dtype=dtype, peak=cache_bytes(30, spec, 16, item))
        assert one.paper_mib == pytest.approx(paper_mib(30, spec, 16))
    assert make_timing("full", 1.0, dtype="int4").paper_mib is None
    heatkv, full = TURNS
    settings = ("budget", "method.sinks", "seed")
    assert full.method == "full"
    assert [full.find_setting(name) for name in settings] == [1.0, None, 5]
    assert heatkv.find_setting("method.sinks") == 3


@pytest.mark.parametrize("text", ["", "[]", '{"rows": 3}'])
def test_a_file_of_another_kind_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^[^\n]*x.json: not a file of task=profile[^\n]*$"):
        read_timings([tmp_path / "x.json"])
