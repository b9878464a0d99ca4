"""What a run would need is found before it starts, and nothing is generated."""

import sys
from pathlib import Path

import pytest

from kvbench.cli.app import main


def checked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["run.py", "task=check", "prompts.count=4", "eval=paired", *words])
    main()
    return " ".join(capsys.readouterr().out.split())


def test_a_run_that_can_start_is_estimated_from_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("method=streaming_llm", "budget=0.2", f"runs_dir={tmp_path}")
    found = checked(monkeypatch, capsys, *words)
    assert "time, disk note no finished run of infinity_tiny in" in found
    assert "weights ok transformer: transformer.safetensors" in found
    assert "error" not in found
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(sys, "argv", ["run.py", *words, "prompts.count=2", "eval=psnr"])
    main()
    capsys.readouterr()
    before = sorted(tmp_path.rglob("*"))
    found = checked(monkeypatch, capsys, *words)
    for told in (
        "method, prompts ok streaming_llm at budget=0.2 (1836 tokens), 4 prompts",
        "for 8 samples",
        "disk ok",
    ):
        assert told in found
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "subject", "text"),
    [
        (("budget=1e-9", "method=swa"), "method, prompts", "budget=1e-09"),
        (
            ("model.sources.tokenizer.path=none.pth",),
            "weights",
            "model.sources.tokenizer.path=none.pth: does not exist",
        ),
        (("require=[lpips]",), "eval=lpips", "weights missing: alexnet"),
    ],
)
def test_what_stands_against_a_run_ends_the_check(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    subject: str,
    text: str,
) -> None:
    with pytest.raises(SystemExit, match=f"task=check: the run cannot start: {subject}$"):
        checked(monkeypatch, capsys, f"runs_dir={tmp_path}", *words)
    assert text in " ".join(capsys.readouterr().out.split())
    assert list(tmp_path.iterdir()) == []
