"""What the page is made of: folders in any state, samples, vendored programs."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.core.config import ConfigError
from kvbench.core.files import hash_path
from kvbench.dashboard import samples
from kvbench.dashboard.document import make_document
from kvbench.dashboard.folders import find_folders
from kvbench.dashboard.page import render_page, write_dashboard
from kvbench.dashboard.plain_yaml import MAX_BYTES as MAX_YAML
from kvbench.dashboard.plain_yaml import parse_yaml
from kvbench.dashboard.run_samples import KEPT
from kvbench.dashboard.vendor import VENDORED
from kvbench.eval.protocol.scores import Metric
from kvbench.report.runs_table import make_rows
from kvbench.report.tables import find_best
from kvbench.runs.record.results import WELL_USED
from tests.support.places import ROOT
from tests.support.results import made_up
from tests.support.run_folders import HOSTILE, PROMPTS, write_image_runs

pytestmark = pytest.mark.usefixtures("settled")


def test_folders_are_told_apart_whatever_state_they_are_in(runs_dir: Path) -> None:
    found = find_folders(runs_dir)
    assert len(found.finished) == 9
    assert [(run.folder, run.status, run.done, run.total) for run in found.unfinished] == [
        ("infinity_tiny/h2o-0.1", "running", 2, 8),
        ("infinity_tiny/hack-0.1", "failed: out of memory", 2, 8),
    ]
    [damaged] = found.damaged
    assert damaged.folder == "infinity_tiny/swa-0.1"
    assert "delete it" in damaged.reason


def test_the_number_of_samples_to_come_is_read_from_the_configuration(tmp_path: Path) -> None:
    prompts = {
        "{count: 4, per_prompt: 3}": 12,
        "{of: {count: 4, per_prompt: 3}}": 12,
        "{count: null}": None,
        "{of: 4}": None,
    }
    for number, text in enumerate(prompts):
        folder = tmp_path / "model" / f"{number}"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(f"prompts: {text}")
    found = {run.folder: run.total for run in find_folders(tmp_path).unfinished}
    assert [found[f"model/{number}"] for number in range(4)] == [*prompts.values()]


def test_the_worst_samples_by_each_metric_are_kept(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_SAMPLES", 1)
    monkeypatch.setattr(samples, "MIN_SAMPLES", 1)
    document = make_document(runs_dir)
    runs = {run["folder"]: run["samples"] for run in document["runs"]}
    heat = runs["infinity_tiny/heatkv-0.1-0123456789"]
    assert heat["index"] == [1, 2]  # the lowest PSNR, the highest LPIPS
    assert [document["shared"][number] for number in heat["prompt"]] == [HOSTILE, PROMPTS[2]]
    assert runs["infinity_tiny/full-0"]["index"] == [1, 2]  # the samples of the same prompts


def test_what_is_kept_changes_nothing_and_is_made_again_where_it_is_damaged(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = ({**make_document(runs_dir), "made": ""} for _ in range(2))
    assert first == again
    whole = (runs_dir / KEPT).read_bytes()
    for torn in (b"", b"\x00\xff", b"0\t1\t2\t3\n", whole[:-40].replace(b'"images"', b'"texts!"')):
        (runs_dir / KEPT).write_bytes(torn)
        assert {**make_document(runs_dir), "made": ""} == first
        assert (runs_dir / KEPT).read_bytes() == whole
    read_again = "kvbench.dashboard.run_samples.read_lines"
    monkeypatch.setattr(read_again, lambda _: pytest.fail("a file was read again"))
    assert {**make_document(runs_dir), "made": ""} == first


def test_a_changed_sample_is_read_again(tmp_path: Path) -> None:
    write_image_runs(tmp_path)
    make_document(tmp_path)
    [path] = tmp_path.glob("*/heatkv-0.1-*/metrics/psnr-uint8.samples.jsonl")
    path.write_text(path.read_text().replace('"psnr": 29.0', '"psnr": 28.5'))
    [run] = [run for run in make_document(tmp_path)["runs"] if path.parents[1].name in run["folder"]]
    assert 28.5 in run["samples"]["values"]["psnr"]
    shutil.rmtree(path.parents[1])
    make_document(tmp_path)
    assert path.parents[1].name not in (tmp_path / KEPT).read_text()


def test_the_document_is_whole_and_cannot_end_its_element(runs_dir: Path, tmp_path: Path) -> None:
    path = write_dashboard(runs_dir, tmp_path / "pages")
    assert path == tmp_path / "pages" / "dashboard.html"
    data = path.read_text(encoding="utf-8").split('id="document">')[1].split("</script>")[0]
    assert "<" not in data
    document = json.loads(data)
    assert HOSTILE in document["shared"]
    assert (path.parent / document["root"]).resolve() == runs_dir.resolve()
    assert data.count("two blue circles") == data.count("kvbench.prompts.scenes.Scenes") == 1
    assert document["wellUsed"] == WELL_USED
    empty = {key: [] for key in ("runs", "published", "sweeps", "unfinished", "damaged", "shared")}
    page = render_page({**empty, "made": "", "metrics": {}, "shared": [{"seed": 2**53 + 1}, {"seed": 2**53}]})
    assert '{"seed":"9007199254740993"},{"seed":9007199254740992}' in page  # a browser rounds large numbers


def test_vendored_files_are_the_published_ones_and_listed() -> None:
    folder, told = ROOT / "kvbench" / "dashboard" / "vendor", (ROOT / "THIRD_PARTY.md").read_text()
    for one in VENDORED:
        assert hash_path(folder / one.name) == one.sha256
        assert "Copyright" in one.read_licence()
        for part in (one.sha256, f"{one.package} {one.version}", one.name, one.licence):
            assert part in told
    names = {name for one in VENDORED for name in (one.name, f"{one.name.split('.')[0]}.LICENSE")}
    assert {path.name for path in folder.iterdir()} == names


def test_without_jinja_or_runs_one_line_is_told(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"runs_dir=.* holds no runs"):
        write_dashboard(tmp_path)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"task=dashboard: .*kvbench\[dashboard\]"):
        write_dashboard(runs_dir)


@pytest.mark.parametrize(("least_share", "shown"), [(0.9699, "0.970!"), (0.97, "0.970")])
def test_the_page_has_the_shares_and_marks_of_the_report(
    least_share: float, shown: str, run_script: Callable[..., str]
) -> None:
    """Of a full cache of 2^18 bytes in 16 bits, 2^17 are 50 %, whatever dtype the reference has."""
    run = made_up("heatkv", 0.1, {}, config={"cache_dtype": "int4"})
    run = replace(run, memory=replace(run.memory, least_share=least_share))
    values = {"memory": vars(run.memory), "latency": {}, "unit": "tokens", "config": run.config}
    program = (
        f"const run = {json.dumps(values)}, MIB = 1, shared = (one) => one;"
        "const format = (one, digits) => one.toFixed(digits);"
        'console.log(formatCost(run, "byte_share"), chooseShare([run]), formatCost(run, "least_share"));'
        'run.config.cache_dtype = "auto"; console.log(chooseShare([run]));'
    )
    told = run_script(program, "costs", wellUsed=WELL_USED)
    assert told.split() == ["50.00", "byte_share", shown, "peak_share"]
    assert [make_rows([run])[0][name] for name in ("bytes %", "least / B")] == ["50.00", shown]


def test_the_page_has_the_best_values_of_the_report(run_script: Callable[..., str]) -> None:
    """Numbers that look alike in a table are equally good."""
    runs = [{"number": number, "value": value} for number, value in enumerate([30.0, 31.001, 31.004])]
    program = (
        "const findMetric = (run) => run; d3.group = (runs) => new Map([[0, runs]]);"
        f'console.log([...findBest({json.dumps(runs)}, "psnr")].join(" "))'
    )
    metrics = {"psnr": {"better": "higher", "digits": 2}}
    told = run_script(program, "leaderboard", metrics=metrics)
    rows = [{"psnr": Metric(run["value"], "higher", n=4, evaluator="psnr", digits=2)} for run in runs]
    best = find_best(rows, [0] * 3)
    assert {(int(number), "psnr") for number in told.split()} == best == {(1, "psnr"), (2, "psnr")}


def test_plain_values_of_yaml_are_read() -> None:
    values = {"a": [1, 2.5, None, True], "b": {"c": "text"}}
    assert parse_yaml("a: [1, 2.5, null, true]\nb: {c: text}\n") == values
    assert parse_yaml(b"a: [1, 2.5, null, true]\nb: {<<: {c: text}}\n") == values


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &x [1]\nb: *x", r"ValueError: it has an alias \(\*name\)"),
        ("a: &x {c: 1}\nb: {<<: [*x, *x]}", "alias"),
        ("x" * (MAX_YAML + 1), "it is larger than 256 KiB"),
        ("[" * 500, "RecursionError|expected"),
        ("!!python/object/apply:os.getcwd []", "ConstructorError"),
        ("{", "ParserError"),
    ],
)
def test_any_other_yaml_is_one_line(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        parse_yaml(text)
    assert "\n" not in str(error.value)
