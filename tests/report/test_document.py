"""The report: what is best, ablations as a paper has them, LaTeX that is well formed, figures of every kind."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvbench.core.config import ConfigError
from kvbench.eval.protocol.scores import Metric
from kvbench.report.ablations import find_ablations, make_ablation_rows
from kvbench.report.document import write_report
from kvbench.report.figures.draw import draw_figures
from kvbench.report.figures.lines import draw_latencies, read_profiles
from kvbench.report.figures.method_styles import METHODS, choose_styles
from kvbench.report.figures.retention_plots import draw_retention, join_sources
from kvbench.report.tables import find_best
from kvbench.runs.generate.retention import Retention
from kvbench.runs.record.results import Results
from tests.support.results import made_up


def psnr(value: float) -> dict[str, Metric]:
    return {
        "psnr": Metric(value, "higher", "dB", n=4, ci95=(value - 1, value + 2), evaluator="psnr", digits=2)
    }


def varied(value: float, seed: int = 0, count: int = 10, **settings: object) -> Results:
    config = {"model": {"name": "m"}, "method": {**settings}, "calibrate": {"count": count}, "seed": seed}
    name = "-".join(map(str, (value, seed, count, *settings.values())))
    return made_up("heatkv", 0.1, psnr(value), config=config, run=f"heatkv-{name}")


def test_the_best_is_the_best_of_those_that_compress_at_one_budget() -> None:
    values = ((30.0, 0.2), (31.0, 0.3), (99.0, 0.0), (20.0, 0.1), (31.001, 0.3), (5.0, 0.5))
    rows = [{**psnr(one), "lpips": Metric(other, "lower", n=4, evaluator="lpips")} for one, other in values]
    groups = [0.1, 0.1, None, 0.2, 0.1, 0.2]
    assert find_best(rows, groups) == {(1, "psnr"), (4, "psnr"), (0, "lpips"), (3, "psnr"), (3, "lpips")}
    assert find_best(rows[1:2], [0.1]) == set()
    assert find_best([rows[1], rows[4]], [0, 0]) == set()  # equal at the digits that are shown


def test_an_ablation_is_of_one_setting() -> None:
    runs = [
        varied(25.0, sinks=2), varied(24.0, sinks=10), varied(23.0, sinks=1), varied(20.0, count=1, sinks=1),
        made_up("full", 1.0, {}), made_up("heatkv", 0.2, psnr(1.0)),
    ]  # fmt: skip
    found = {one.setting: one for one in find_ablations(runs)}
    assert set(found) == {"method.sinks", "calibrate.count"}
    assert found["method.sinks"].others == {"calibrate.count": 10}
    assert found["calibrate.count"].others == {"method.sinks": 1}
    rows = make_ablation_rows(found["method.sinks"])
    assert [list(row) for row in rows] == [["method.sinks", "peak %", "psnr"]] * 3
    assert [row["method.sinks"] for row in rows] == ["1", "2", "10"]
    values = [row["psnr"] for row in rows]
    assert [one.value for one in values if isinstance(one, Metric)] == [23.0, 25.0, 24.0]
    assert [row["calibrate.count"] for row in make_ablation_rows(found["calibrate.count"])] == ["1", "10"]
    assert find_ablations(runs[:1]) == []


def test_a_method_looks_the_same_in_every_figure() -> None:
    alone = {name: choose_styles([name])[name] for name in (*METHODS, "mine")}
    assert len(set(alone.values())) == len(alone)
    assert choose_styles(alone) == {name: alone[name] for name in sorted(alone)}


def make_retention(sources: int, prompt: bool = False) -> Retention:
    rng = np.random.default_rng(0)
    kept = rng.random((3, 2, sources)).round(3)
    names = [f"row {n}" for n in range(1, sources + 1)]
    names[0] = "prompt" if prompt else names[0]
    tokens = tuple(float(n) for n in range(5, 5 + sources))
    return Retention(9, tuple(names), tokens, tuple(tuple(map(tuple, layer)) for layer in kept.tolist()), 4)


@pytest.mark.parametrize(
    ("sources", "prompt", "count"),
    [(4, False, 4), (31, False, 11), (31, True, 11), (1, True, 1)],
)
def test_a_map_has_the_tokens_of_all_its_sources(sources: int, prompt: bool, count: int) -> None:
    retention = make_retention(sources, prompt)
    labels, shares = join_sources(retention, 12)
    assert len(labels) == len(set(labels)) == shares.shape[2] == count
    assert labels[0].startswith("prompt" if prompt else "row 1")
    if prompt:
        assert shares[1, 1, 0] == pytest.approx(retention.kept[1][1][0])
    width = -(-(sources - prompt) // (12 - prompt))
    for place in range(count - prompt):
        part = range(prompt + place * width, min(prompt + (place + 1) * width, sources))
        held = sum(retention.kept[2][1][n] * retention.tokens[n] for n in part)
        assert shares[2, 1, place + prompt] == pytest.approx(held / sum(retention.tokens[n] for n in part))


def test_maps_show_layers_down_and_heads_across() -> None:
    retention = make_retention(3)
    axes = draw_retention(retention, "a run").axes[0]
    letters = {text.get_text(): text.get_position() for text in axes.texts}
    assert (axes.get_xlim()[0], axes.get_ylim()[1]) == (0, 0)
    for place, (shown, name) in enumerate(zip(axes.images, retention.sources, strict=True)):
        expected = [[head[place] for head in layer] for layer in retention.kept]
        np.testing.assert_allclose(np.asarray(shown.get_array()), expected, rtol=1e-12)
        left, right, low, high = shown.get_extent()
        assert left < letters[name][0] < right
        assert letters[name][1] < high < letters["2"][1] < low  # layers go downwards
        assert shown.get_clim() == (0, 1)


def profile(status: str, method: str, *batches: int) -> str:
    rows: list[dict[str, object]] = [{"batch": 99, "cache": method, "status": "out of memory"}]
    for n in batches:
        for name, scale in ((method, 1.0), ("full", 2.0)):
            latency = {"median": n * scale, "p10": n / 2, "p90": 3.0 * n}
            rows.append({"batch": n, "cache": name, "status": "ok", "latency": latency})
    made = {"gpu": None, "cpu": "x86", "threads": 2}
    return json.dumps(
        {"status": status, "model": "m", "budget": {"fraction": 0.1}, "provenance": made, "rows": rows}
    )


def test_latency_is_of_finished_profiles(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    (folder / "a.json").write_text(profile("done", "heatkv", 4, 1))
    (folder / "b.json").write_text(profile("running", "snapkv", 1))
    found = read_profiles(tmp_path)
    assert found == {
        "m, x86, 2 threads": {
            "heatkv, 10 %": [(1, 1.0, 0.5, 3.0), (4, 4.0, 2.0, 12.0)],
            "full": [(1, 2.0, 0.5, 3.0), (4, 8.0, 2.0, 12.0)],
        }
    }
    packed = {**json.loads(profile("done", "heatkv", 1)), "cache_dtype": "int4"}
    (folder / "int4.json").write_text(json.dumps(packed))
    assert set(read_profiles(tmp_path)) == {"m, x86, 2 threads", "m, x86, 2 threads, int4"}
    axes = draw_latencies(found["m, x86, 2 threads"], "m").axes[0]
    assert {line.get_label(): line.get_ydata().tolist() for line in axes.lines} == {
        "heatkv, 10 %": [1.0, 1.0],
        "full": [2.0, 2.0],
    }
    assert axes.lines[0].get_xdata().tolist() == [1, 4]
    (folder / "c.json").write_text('{"status": "done"}')
    with pytest.raises(ConfigError, match=r"c\.json: damaged \(KeyError 'provenance'\); delete it"):
        read_profiles(tmp_path)


def test_figures_are_drawn_as_png_svg_and_pdf(tmp_path: Path) -> None:
    """Files of figures that were drawn before and cannot be now are removed, and no others."""
    runs = [made_up(method, share, psnr(30 + share)) for method in ("heatkv", "swa") for share in (0.1, 0.4)]
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "a.json").write_text(profile("done", "heatkv", 1, 2))
    folder = tmp_path / runs[0].model / runs[0].run
    folder.mkdir(parents=True)
    (folder / "retention.json").write_text(make_retention(5).to_json())
    drawn, left_out = draw_figures(tmp_path, runs, tmp_path)
    assert left_out == []
    names = ["fidelity", "latency", "retention-heatkv-0.1-0123456789"]
    assert [path.name for path in drawn] == [f"{name}.png" for name in names]
    for path in drawn:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert all(mark in path.with_suffix(".svg").read_text() for mark in ("<svg", "</text>"))
        assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    (tmp_path / "mine.png").touch()
    write_report(tmp_path, runs, figures=drawn)
    (folder / "retention.json").write_text("{}")
    (tmp_path / "profile" / "a.json").write_text("{")
    again, left_out = draw_figures(tmp_path, runs, tmp_path)
    assert [path.name for path in again] == ["fidelity.png"]
    assert [line.partition(":")[0] for line in left_out] == ["latency", f"map of {runs[0].run}"]
    write_report(tmp_path, runs, figures=again)
    assert {path.stem for path in tmp_path.iterdir() if path.is_file()} == {"fidelity", "mine", "report"}
