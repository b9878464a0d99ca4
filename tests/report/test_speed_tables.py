"""Timings of task=profile beside published ones: numbers worked out by hand, rows found, files that are none."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec, next_scale
from kvbench.engine.memory import cache_bytes, paper_mib
from kvbench.report.papers.published import find
from kvbench.report.papers.speed import Timing, make_rows, read_timings
from tests.support.speed import make_profile, make_timing


def test_numbers_are_those_of_the_file() -> None:
    """Batch 10: full 5 s, of which 1 s decodes, 8 GB reserved; HeadKV 3 s, 1 s, 6 GB."""
    full = make_timing("full", 1.0, batch=10, seconds=5.0, decode=1.0, reserved=8_000_000_000)
    headkv = make_timing("headkv", 0.2622, batch=10, seconds=3.0, decode=1.0, reserved=6_000_000_000)
    rows = make_rows(find("headkv_table4"), [headkv, full])
    assert [row["method"] for row in rows] == ["full", "headkv"]  # in the order of the paper
    row = dict(rows[1])
    assert (row["budget"], row["batch"]) == ("0.2622", "10")
    assert (row["latency s"], row["latency s, llamagen_xl"]) == ("3", "42.99")
    assert (row["images/s"], row["images/s, llamagen_xl"]) == ("3.333", "2.98")
    assert (row["memory GB"], row["memory GB, llamagen_xl"]) == ("6", "14.63")
    assert (row["saving %"], row["saving %, llamagen_xl"]) == ("25", "56.85")
    assert (row["generation s"], row["decoding s"], row["x full"]) == ("2", "1", "0.5")
    assert not {"s/batch", "reserved GB"} & set(row)  # which two published columns repeat
    assert dict(rows[0])["saving %"] == "0"


def test_a_cpu_says_what_it_cannot_measure_and_a_batch_that_does_not_fit_is_out_of_memory() -> None:
    fits = make_timing("ams_kv", 1.0, model="var_d30", batch=128, largest=300)
    fails = make_timing("full", 1.0, model="var_d30", batch=128, status="out of memory")
    full, ams = map(dict, make_rows(find("ams_kv_table6"), [fits, fails]))
    assert (full["images/s"], full["images/s, var_d30"], full["reserved GB"]) == ("OOM", "OOM", "OOM")
    assert (ams["images/s, var_d30"], ams["reserved GB"], ams["x full"]) == ("23.00", "n/a", "-")
    assert (full["largest batch"], ams["largest batch"]) == ("-", "300")


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2)])
def test_the_cache_is_counted_as_the_paper_counts_it(dtype: str, item: int) -> None:
    spec = ModelSpec("x", 3, 2, 8, next_scale([(1, 1), (2, 2), (4, 4)]))
    one = make_timing("full", 1.0, batch=16, dtype=dtype, peak=cache_bytes(30, spec, 16, item))
    assert one.paper_mib == pytest.approx(paper_mib(30, spec, 16))
    assert make_timing("full", 1.0, dtype="int4").paper_mib is None


def test_a_full_cache_timed_in_turns_has_no_setting_of_the_method() -> None:
    profile = make_profile("heatkv", 0.1, model="infinity_2b", config={"method": {"sinks": 3}, "seed": 5})
    heatkv, full = (
        Timing(profile, {**make_timing(name, 1.0, seconds=seconds, batch=2).row, "cache": name})
        for name, seconds in (("heatkv", 3.0), ("full", 4.0))
    )
    assert (full.method, full.find_setting("budget"), full.find_setting("method.sinks")) == (
        "full",
        1.0,
        None,
    )
    assert (heatkv.find_setting("method.sinks"), full.find_setting("seed")) == (3, 5)
    other = make_timing("full", 1.0, model="infinity_2b", batch=2, seconds=100.0)
    rows = [dict(row) for row in make_rows(find("heatkv_fig5_speed"), [other, heatkv, full])]
    assert rows[0]["x full"] == "0.75"  # of the full cache in the same file
    assert rows[0]["x full, infinity_2b"] == "matches"


def test_without_a_table_every_timing_is_a_row() -> None:
    timings = [make_timing("heatkv", 0.1, batch=batch) for batch in (4, 2)]
    assert [row["batch"] for row in make_rows(None, timings)] == ["4", "2"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": 3}'])
def test_a_file_of_another_kind_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"x.json: no file of task=profile") as told:
        read_timings([tmp_path / "x.json"])
    assert "\n" not in str(told.value)


def test_files_are_read_once_and_in_order(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path, batch in zip(paths, (3, 4), strict=True):
        one = make_timing("full", 1.0, batch=batch)
        contents: dict[str, Any] = {**one.profile, "rows": [one.row]}
        path.write_text(json.dumps(contents))
    assert [one.row["batch"] for one in read_timings([*paths, paths[0]])] == [3, 4]
