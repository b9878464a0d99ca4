"""What the page is made of: folders in any state, samples, vendored programs."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.core.config import ConfigError
from kvbench.dashboard import samples
from kvbench.dashboard.document import make_document
from kvbench.dashboard.folders import find_folders
from kvbench.dashboard.page import render_page, write_dashboard
from kvbench.dashboard.pool import Pool
from kvbench.dashboard.run_samples import KEPT, SamplesCache
from kvbench.dashboard.vendor import VENDORED, Vendored
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


@pytest.mark.parametrize(
    ("prompts", "total"),
    [
        ("{count: 4}", 4),
        ("{count: 4, per_prompt: 3}", 12),
        ("{of: {count: 4, per_prompt: 3}}", 12),
        ("{count: null}", None),
        ("{of: 4}", None),
    ],
)
def test_the_number_of_samples_to_come_is_read_from_the_configuration(
    tmp_path: Path, prompts: str, total: int | None
) -> None:
    folder = tmp_path / "model" / "run"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"prompts: {prompts}")
    [run] = find_folders(tmp_path).unfinished
    assert run.total == total


def test_no_file_of_a_run_can_stop_the_page(runs_dir: Path, tmp_path: Path) -> None:
    [source] = runs_dir.glob("*/heatkv-0.1-*")
    folder = tmp_path / "model" / "run"
    (folder / "metrics").mkdir(parents=True)
    (folder / "results.json").write_bytes((source / "results.json").read_bytes())
    for name in ("samples.jsonl", "retention.json", "metrics/psnr-uint8.samples.jsonl", "config.yaml"):
        (folder / name).write_bytes(b'\xff\x00[1]\n{"index": "x"}\nnull\n')
    [run] = make_document(tmp_path)["runs"]
    assert run["conditions"].startswith(f"{run['model']} ({run['prompts']}), n = {run['n']}")
    assert run["samples"]["index"] == []
    assert "damaged" in run["retention"]["reason"]
    assert run["reference"] is None


def test_the_worst_samples_by_each_metric_are_kept(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_SAMPLES", 1)
    monkeypatch.setattr(samples, "MIN_SAMPLES", 1)
    found = find_folders(runs_dir)
    pool, readings = Pool(), SamplesCache(runs_dir)
    read = {folder: readings.read(folder, run) for folder, run in found.finished.items()}
    entries = samples.list_samples(found.finished, read, pool)
    listed = {folder.name: entry for folder, entry in entries.items()}
    run = listed["heatkv-0.1-0123456789"]
    assert run["index"] == [1, 2]  # the lowest PSNR, the highest LPIPS
    assert [pool.values[number] for number in run["prompt"]] == [HOSTILE, PROMPTS[2]]
    full = next(entry for folder, entry in entries.items() if folder.match("infinity_tiny/full-0"))
    assert full["index"] == [1, 2]  # what stands beside them


def make_twice(runs_dir: Path) -> tuple[dict[str, object], dict[str, object]]:
    """The document before and after what was read is kept."""
    (runs_dir / KEPT).unlink(missing_ok=True)
    first, again = ({**make_document(runs_dir), "made": ""} for _ in range(2))
    return first, again


def test_what_is_kept_changes_nothing(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = make_twice(runs_dir)
    assert first == again
    with monkeypatch.context() as patch:
        patch.setattr(
            "kvbench.dashboard.run_samples.read_lines", lambda _: pytest.fail("a file was read again")
        )
        assert {**make_document(runs_dir), "made": ""} == first


@pytest.mark.parametrize("damage", [b"", b"\x00\xff", b"0\t1\t2\t3\n", None])
def test_a_damaged_file_of_what_is_kept_is_made_again(runs_dir: Path, damage: bytes | None) -> None:
    first, _ = make_twice(runs_dir)
    whole = (runs_dir / KEPT).read_bytes()
    torn = whole[:-40].replace(b'"images"', b'"texts!"') if damage is None else damage
    (runs_dir / KEPT).write_bytes(torn)
    assert {**make_document(runs_dir), "made": ""} == first
    assert (runs_dir / KEPT).read_bytes() == whole


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


def test_what_runs_share_is_written_once(runs_dir: Path) -> None:
    document = make_document(runs_dir)
    text = json.dumps(document)
    assert document["wellUsed"] == WELL_USED
    assert text.count("two blue circles") == 1
    assert text.count("kvbench.prompts.scenes.Scenes") == 1


def test_the_document_cannot_end_its_element(runs_dir: Path) -> None:
    page = write_dashboard(runs_dir).read_text(encoding="utf-8")
    begin = page.index('id="document">') + len('id="document">')
    data = page[begin : page.index("</script>", begin)]
    assert "<" not in data
    assert HOSTILE in json.loads(data)["shared"]


def test_the_page_itself_stays_small() -> None:
    empty = {key: [] for key in ("runs", "published", "sweeps", "unfinished", "damaged", "shared")}
    assert len(render_page({**empty, "made": "", "metrics": {}})) < 620_000


@pytest.mark.parametrize("vendored", VENDORED, ids=lambda one: one.name)
def test_vendored_files_are_the_published_ones(vendored: Vendored) -> None:
    content = (ROOT / "kvbench" / "dashboard" / "vendor" / vendored.name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == vendored.sha256
    assert "Copyright" in vendored.read_licence()
    told = (ROOT / "THIRD_PARTY.md").read_text()
    for part in (vendored.sha256, f"{vendored.package} {vendored.version}", vendored.name, vendored.licence):
        assert part in told


def test_every_vendored_file_is_listed() -> None:
    there = {path.name for path in (ROOT / "kvbench" / "dashboard" / "vendor").iterdir()}
    assert there == {name for one in VENDORED for name in (one.name, f"{one.name.split('.')[0]}.LICENSE")}


def test_without_jinja_one_line_says_what_to_install(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"task=dashboard: .*kvbench\[dashboard\]"):
        write_dashboard(runs_dir)


def test_an_empty_folder_has_no_page(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"runs_dir=.* holds no runs"):
        write_dashboard(tmp_path)


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
@pytest.mark.parametrize(("least_share", "shown"), [(0.9699, "0.970!"), (0.97, "0.970")])
def test_the_page_has_the_shares_and_marks_of_the_report(least_share: float, shown: str) -> None:
    """Of a full cache of 2^18 bytes in 16 bits, 2^17 are 50 %, whatever dtype the reference has."""
    run = made_up("heatkv", 0.1, {}, config={"cache_dtype": "int4"})
    run = replace(run, memory=replace(run.memory, least_share=least_share))
    values = {"memory": vars(run.memory), "latency": {}, "unit": "tokens", "config": run.config}
    costs = (ROOT / "kvbench" / "dashboard" / "scripts" / "costs.js").read_text()
    program = (
        f"const run = {json.dumps(values)}, MIB = 1, shared = (one) => one, DOC = {{wellUsed: {WELL_USED}}};"
        "const format = (one, digits) => one.toFixed(digits);"
        f'{costs}; console.log(formatCost(run, "byte_share"), chooseShare([run]));'
        'console.log(formatCost(run, "least_share"));'
        'run.config.cache_dtype = "auto"; console.log(chooseShare([run]));'
    )
    told = subprocess.run(["node", "-e", program], capture_output=True, check=True, text=True).stdout
    assert told.split() == ["50.00", "byte_share", shown, "peak_share"]
    assert [make_rows([run])[0][name] for name in ("bytes %", "least / B")] == ["50.00", shown]


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
def test_the_page_has_the_best_values_of_the_report() -> None:
    """Numbers that look alike in a table are equally good."""
    runs = [{"number": number, "value": value} for number, value in enumerate([30.0, 31.001, 31.004])]
    board = (ROOT / "kvbench" / "dashboard" / "scripts" / "leaderboard.js").read_text()
    program = (
        'const DOC = {metrics: {psnr: {better: "higher", digits: 2}}}, findMetric = (run) => run;'
        "const d3 = {group: (runs) => new Map([[0, runs]])};"
        + re.search(r"^function findBest.*?^}", board, re.DOTALL | re.MULTILINE)[0]
        + f'console.log([...findBest({json.dumps(runs)}, "psnr")].join(" "))'
    )
    told = subprocess.run(["node", "-e", program], capture_output=True, check=True, text=True).stdout
    rows = [{"psnr": Metric(run["value"], "higher", n=4, evaluator="psnr", digits=2)} for run in runs]
    assert (
        {(int(number), "psnr") for number in told.split()}
        == find_best(rows, [0] * 3)
        == {(1, "psnr"), (2, "psnr")}
    )


def test_a_page_written_elsewhere_links_the_runs_where_they_are(runs_dir: Path, tmp_path: Path) -> None:
    page = write_dashboard(runs_dir, tmp_path / "pages")
    assert page == tmp_path / "pages" / "dashboard.html"
    root = re.search(r'"root":"([^"]+)"', page.read_text())
    assert root is not None
    assert (page.parent / root[1]).resolve() == runs_dir.resolve()


def test_whole_numbers_that_a_browser_would_round_are_texts() -> None:
    empty = {key: [] for key in ("runs", "published", "sweeps", "unfinished", "damaged", "shared")}
    page = render_page({**empty, "made": "", "metrics": {}, "shared": [{"seed": 2**53 + 1}, {"seed": 2**53}]})
    assert '{"seed":"9007199254740993"},{"seed":9007199254740992}' in page
