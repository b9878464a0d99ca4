"""What a run would need is found before it starts, and nothing is generated."""

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from kvbench.core.files import hash_path
from tests.support.command_line import Command
from tests.support.fake_hub import COMMIT, FakeHub
from tests.support.places import ROOT

CHECK = ("task=check", "prompts.count=4", "eval=paired")
PARTS = ("transformer", "tokenizer", "text")


@pytest.mark.slow
def test_a_run_that_can_start_is_estimated_from_those_before(tmp_path: Path, command: Command) -> None:
    words = ("method=streaming_llm", "budget=0.2", f"runs_dir={tmp_path}")
    status, out, _ = command(*CHECK, *words)
    found = " ".join(out.split())
    assert status == 0
    assert "disk note no finished run of infinity_tiny in" in found
    assert "weights ok transformer: transformer.safetensors" in found
    assert "error" not in found
    assert list(tmp_path.iterdir()) == []
    assert command(*words, "prompts.count=2", "eval=psnr")[0] == 0
    before = sorted(tmp_path.rglob("*"))
    found = " ".join(command(*CHECK, *words)[1].split())
    fits = "method, prompts ok streaming_llm at budget=0.2 (1836 tokens), 4 prompts"
    for told in (fits, "for 8 samples", "disk ok"):
        assert told in found
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "subject", "text"),
    [
        ("budget=1e-9 method=swa", "method, prompts", "budget=1e-09"),
        ("model.sources.tokenizer.path=none.pth", "weights", "tokenizer.path=none.pth: does not exist"),
        ("require=[lpips]", "eval=lpips", "weights missing: alexnet"),
    ],
)
def test_obstacles(tmp_path: Path, command: Command, words: str, subject: str, text: str) -> None:
    status, out, err = command(*CHECK, f"runs_dir={tmp_path}", *words.split())
    assert status == 1
    assert err.endswith(f"task=check: the run cannot start: {subject}\n")
    assert text in " ".join(out.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_weights_are_listed(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_WEIGHTS", str(tmp_path / "weights"))
    assets = ROOT / "kvbench" / "assets" / "infinity_tiny"
    files = {f"{part}.safetensors": (assets / f"{part}.safetensors").read_bytes() for part in PARTS}
    hub = FakeHub({"owner/tiny": files}, monkeypatch, tmp_path / "cache")
    words = [
        f"+model.sources.{part}.{key}" if key != "path" else f"model.sources.{part}.path=null"
        for part in PARTS
        for key in ("path", "repo=owner/tiny", f"file={part}.safetensors")
    ]
    size = len(files["transformer.safetensors"]) / 1e6
    found = " ".join(command(*CHECK, *words)[1].split())
    assert f"transformer: owner/tiny from the Hub ({size:.1f} MB to download)" in found
    assert hub.sent == []
    status, out, _ = command("task=weights", *words)
    assert status == 0
    assert "HTTP" not in out
    for part in PARTS:
        digest = hash_path(assets / f"{part}.safetensors")
        assert f"commit {COMMIT}, sha256 {digest}" in next(
            x for x in out.splitlines() if x.startswith(f"{part}:")
        )
    hub.close()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    run = ("prompts.count=1", "eval=none", "method=streaming_llm", "budget=0.2", f"runs_dir={tmp_path}/runs")
    assert command(*run, *words)[0] == 0
    for path in (tmp_path / "runs").rglob("provenance.json"):
        sources = json.loads(path.read_text())["sources"]
        assert {one["commit"] for one in sources.values()} == {COMMIT}
    fetched = {path.parent.name for path in (tmp_path / "runs").rglob("provenance.json")}
    assert command(*run)[0] == 0  # the run's name is that of the contents, wherever they come from
    assert {path.parent.name for path in (tmp_path / "runs").rglob("provenance.json")} == fetched
