"""Frames of runs and samples, against the files they are made of."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvbench
from kvbench.core.config import ConfigError
from kvbench.data import frames
from kvbench.data.flatten import FIXED, find_kinds
from kvbench.data.frames import KEPT, TooLargeError, export_frames, load_rows, read_table
from kvbench.eval.paired.psnr import Psnr
from kvbench.eval.protocol.scores import Metric
from kvbench.runs import execute
from kvbench.runs.record.results import Results, read_results
from kvbench.runs.record.samples import read_scores
from tests.support.fake_run import job_in
from tests.support.results import LPIPS, PSNR, made_up
from tests.support.run_folders import write_run


def write(root: Path, *runs: Results) -> None:
    for run in runs:
        folder = root / run.model / run.run
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(run.to_json())


def metric(of: Metric, value: float | None, **more: object) -> Metric:
    return Metric(**{**vars(of), "value": value, "n": 96, **more})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    execute.run(job_in(root, count=4))
    return root


def test_a_row_says_what_results_say(runs: Path) -> None:
    frame = kvbench.runs_df(runs)
    assert frame["folder"].to_list() == sorted(
        f"fake/{path.parent.name}" for path in runs.glob("fake/*/results.json")
    )
    for row in frame.rows(named=True):
        values = json.loads((runs / row["folder"] / "results.json").read_text())
        assert row["run"] == values["run"]
        assert row["reference"] == values["reference"]
        assert row["n"] == values["n"] == 4
        assert row["method.sinks"] == values["config"]["method"].get("sinks")
        for section in ("memory", "latency"):
            assert {name: row[f"{section}.{name}"] for name in values[section]} == values[section]
        memory = values["memory"]
        assert row["peak"] == memory["peak_tokens"] / memory["full_tokens"]
        for name, found in values["metrics"].items():
            if found["value"] is None:
                assert row.get(name) is None
                continue
            ends = found["ci95"] or (None, None)
            shown = [row.get(f"{name}{end}") for end in ("", ".low", ".high", ".n")]
            assert shown == [found["value"], *ends, found["n"]]


def test_a_sample_has_its_costs_and_its_values(runs: Path) -> None:
    frame = kvbench.samples_df(runs)
    assert len(frame) == 8
    [folder] = runs.glob("fake/streaming_llm-*")
    some = kvbench.samples_df([folder])
    assert some.equals(frame.filter(pl.col("folder").str.contains("streaming_llm")))
    assert some.join(kvbench.runs_df(runs), on="folder")["method"].to_list() == ["streaming_llm"] * 4
    for row in frame.rows(named=True):
        folder = runs / row["folder"]
        line = json.loads((folder / "samples.jsonl").read_text().splitlines()[row["index"]])
        for name in ("prompt", "seed", "seconds", "peak_tokens", "last_tokens"):
            assert row[name] == line[name]
        scores = folder / "metrics" / "psnr-uint8.samples.jsonl"
        if not scores.is_file():
            assert row["psnr"] is None
            continue
        score = json.loads(scores.read_text().splitlines()[row["index"]])
        assert (row["psnr"], row["mse"]) == (score["psnr"], score["mse"])


def test_a_value_of_an_evaluator_does_not_hide_a_sample_s_own(tmp_path: Path) -> None:
    run = made_up("own", 0.1, {"psnr": metric(PSNR, 30.0, n=1)}, n=1)
    write_run(tmp_path, run, [("a cup", {}, b"")], values={"psnr-uint8": {"seed": [8], "psnr": [30.0]}})
    [row] = kvbench.samples_df(tmp_path).rows(named=True)
    assert (row["prompt"], row["seed"], row["psnr"]) == ("a cup", 0, 30.0)


def test_columns_hold_what_all_runs_hold(tmp_path: Path) -> None:
    config: Mapping[str, object] = {"model": {"name": "m", "sampling": {"tau": [1.0, 0.5]}}, "seed": 3}
    settings = ({"x": 1}, {"x": 0.5}, {"x": "all", "y": None}, {"x": True, "z": 2})
    metrics = (
        {"psnr": metric(PSNR, 30.0, ci95=(29.0, 31.5))},
        {"lpips": metric(LPIPS, None, status="skipped")},
        {"psnr": metric(PSNR, 20.0)},
        {},
    )
    for number, (method, found) in enumerate(zip(settings, metrics, strict=True), 1):
        write(tmp_path, made_up("abcd"[number - 1], number / 10, found, config={**config, "method": method}))
    frame = kvbench.runs_df(tmp_path)
    assert frame.columns[: len(FIXED)] == list(FIXED)
    assert frame["method.x"].to_list() == ["1", "0.5", "all", "true"]
    assert frame["method.z"].dtype == pl.Int64
    assert frame["model.sampling.tau"].to_list() == ["[1.0, 0.5]"] * 4
    assert frame["seed"].to_list() == [3] * 4
    assert frame.columns[-4:] == ["psnr", "psnr.low", "psnr.high", "psnr.n"]
    assert frame["psnr"].to_list() == [30.0, None, 20.0, None]
    assert frame["psnr.low"].to_list() == [29.0, None, None, None]
    assert frame["budget"].to_list() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert not {"lpips", "lpips.n", "method.y"} & set(frame.columns)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.floats(-1e300, 1e300), st.text()
)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), VALUES), max_size=5))
def test_kinds_do_not_depend_on_the_order_of_rows(rows: list[dict[str, str | float | bool | None]]) -> None:
    kinds = find_kinds(rows)
    assert kinds == find_kinds(reversed(rows))
    held = {name: {type(row[name]) for row in rows if row.get(name) is not None} for name in "abc"}
    assert kinds.keys() == {name for name, types in held.items() if types}
    for name, kind in kinds.items():
        if kind in ("bool", "int"):
            assert held[name] == {{"bool": bool, "int": int}[kind]}


READERS: dict[str, Callable[[Path], pl.DataFrame]] = {
    "parquet": pl.read_parquet,
    "csv": pl.read_csv,
    "json": lambda path: pl.DataFrame(json.loads(path.read_text()), infer_schema_length=None),
}


@pytest.mark.parametrize("form", READERS)
def test_frames_are_exported(runs: Path, form: str) -> None:
    paths = export_frames(runs, form)
    assert [path.name for path in paths] == [f"runs.{form}", f"samples.{form}"]
    for path, frame in zip(paths, (kvbench.runs_df(runs), kvbench.samples_df(runs)), strict=True):
        found = READERS[form](path)
        assert found.columns == frame.columns
        assert found["folder"].to_list() == frame["folder"].to_list()
        assert form == "csv" or found.to_dicts() == frame.to_dicts()


def test_what_is_wrong_is_told_in_a_line(tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nowhere: no such folder"):
        kvbench.runs_df(tmp_path / "nowhere")
    assert load_rows(tmp_path / "nowhere") == []
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="holds no finished runs"):
        export_frames(tmp_path, "csv")
    assert kvbench.runs_df(tmp_path).is_empty()
    with pytest.raises(ConfigError, match=r"fake: has no results\.json; finish the run first"):
        kvbench.samples_df([runs / "fake"])
    write(tmp_path, made_up("a", 0.1, {}))
    [path] = tmp_path.rglob("results.json")
    (path.parent / "samples.jsonl").write_text('{"index": 0, "sha256": ""}\n[]\n')
    with pytest.raises(ConfigError, match=r"samples\.jsonl: damaged \(line 2: TypeError .*\); delete it"):
        kvbench.samples_df(tmp_path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"results\.json: cannot be read"):
        kvbench.runs_df(tmp_path)
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ConfigError, match=r'^polars is missing; .*pip install "kvbench\[data\]"$'):
        kvbench.runs_df(runs)


HARMS: dict[str, Callable[[list[str]], list[str]]] = {
    "3 values of psnr": lambda lines: [lines[0].replace('"psnr": ', '"psnr": [], "was": '), *lines[1:]],
    "3 values of psnr, whose n is 4": lambda lines: [*lines[1:], lines[1]],
    "index 9: there are 4": lambda lines: [*lines[1:], lines[0].replace('"index": 0', '"index": 9')],
    "TypeError": lambda lines: [*lines[1:], "[]"],
    "JSONDecodeError": lambda lines: [*lines[1:], '{"ind'],
}


def test_a_damaged_file_of_an_evaluator_is_no_null(tmp_path: Path) -> None:
    execute.run(job_in(tmp_path, count=4, evaluators={"psnr": Psnr()}))
    [path] = tmp_path.glob("fake/streaming_llm-*/metrics/psnr-uint8.samples.jsonl")
    folder, lines = path.parents[1], path.read_text().splitlines()
    values = [json.loads(line)["psnr"] for line in lines]
    assert kvbench.samples_df([folder])["psnr"].to_list() == values
    assert None not in values
    for reason, harm in HARMS.items():
        path.write_text("\n".join(harm(lines)) + "\n")
        damaged = rf"psnr-uint8.samples.jsonl: damaged \(.*{reason}.*run it"
        with pytest.raises(ConfigError, match=damaged):
            kvbench.samples_df([folder])
        with pytest.raises(ConfigError, match=damaged):
            read_scores(folder, read_results(folder))


@pytest.fixture
def several(tmp_path: Path, settled: None) -> Path:
    root = tmp_path / "several"
    write(root, *(made_up(f"m{n}", 0.1, {"psnr": PSNR}, model=f"model{n % 2}") for n in range(7)))
    return root


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Methods of the runs whose results were read."""
    seen: list[str] = []

    def note(folder: Path) -> Results | None:
        seen.append(folder.name.split("-")[0])
        return read_results(folder)

    monkeypatch.setattr(frames, "read_results", note)
    return seen


def test_rows_are_read_once_until_their_results_change(several: Path, reads: list[str]) -> None:
    assert load_rows(several) == load_rows(several)
    assert len(reads) == len(load_rows(several)) == 7
    write(several, made_up("m3", 0.1, {}, model="model1", n=5), made_up("new", 0.1, {}))
    [gone] = several.glob("model0/m0-*/results.json")
    gone.unlink()
    [path] = several.glob("*/m2-*/results.json")  # another size at the same time
    time = path.stat().st_mtime_ns
    path.write_text(path.read_text() + "\n")
    os.utime(path, ns=(time, time))
    reads.clear()
    found = load_rows(several)
    assert sorted(reads) == ["m2", "m3", "new"]
    (several / KEPT).unlink()
    assert load_rows(several) == found
    (several / KEPT).write_bytes(b"no rows")
    assert kvbench.runs_df(several)["folder"].to_list() == [row["folder"] for row in found]


def test_where_nothing_can_be_written_the_user_keeps_rows(
    several: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(frames, "find_obstacle", lambda folder: "no permission")
    assert load_rows(several) == load_rows(several)
    assert (len(reads), (several / KEPT).exists()) == (7, False)
    assert len(list((tmp_path / "caches" / "kvbench").iterdir())) == 1


def test_a_table_within_its_bounds_is_read_and_a_run_of_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    whole = pl.DataFrame(
        {"folder": ["x", "x", "y"], "psnr": [1.0, None, 3.0], "late": [True, False, None], "none": [None] * 3}
    )
    whole.write_parquet(path)
    assert read_table(path, 3).equals(whole)
    assert read_table(path, 1, "y")["psnr"].to_list() == [3.0]
    with pytest.raises(TooLargeError, match=r"a.parquet: has 3 rows, the records give 2"):
        read_table(path, 2)
    assert read_table(path, 0, "z").height == 0


def test_a_kilobyte_that_holds_gigabytes_of_text_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "MOST_BYTES", 2**26)  # of gibibytes, which take seconds
    path = tmp_path / "a.parquet"
    column = pl.Series(["a" * 2**18]).new_from_index(0, 2**8)
    pl.DataFrame({"folder": ["x"] * 255 + ["y"], "text": column}).write_parquet(path)
    assert path.stat().st_size < 2**12
    with pytest.raises(TooLargeError, match="a gibibyte of texts or more"):
        read_table(path, 2**8)
    assert read_table(path, 1, "y")["text"].str.len_bytes().to_list() == [2**18]


@pytest.mark.parametrize("column", [[[1, 2]], pl.Series(["a"], dtype=pl.Categorical)], ids=str)
def test_columns_of_other_types_are_refused(column: object, tmp_path: Path) -> None:
    pl.DataFrame({"folder": ["x"], "more": column}).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(TooLargeError, match=r"column 'more' must hold numbers or texts"):
        read_table(tmp_path / "a.parquet", 1)
