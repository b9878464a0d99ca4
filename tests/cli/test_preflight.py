"""What a run would need is found before it starts, and nothing is generated."""

from pathlib import Path

import pytest

from tests.support.command_line import Command

CHECK = ("task=check", "prompts.count=4", "eval=paired")


def test_a_run_that_can_start_is_estimated_from_those_before(tmp_path: Path, command: Command) -> None:
    words = ("method=streaming_llm", "budget=0.2", f"runs_dir={tmp_path}")
    status, out, _ = command(*CHECK, *words)
    found = " ".join(out.split())
    assert status == 0
    assert "time, disk note no finished run of infinity_tiny in" in found
    assert "weights ok transformer: transformer.safetensors" in found
    assert "error" not in found
    assert list(tmp_path.iterdir()) == []
    assert command(*words, "prompts.count=2", "eval=psnr")[0] == 0
    before = sorted(tmp_path.rglob("*"))
    found = " ".join(command(*CHECK, *words)[1].split())
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
    tmp_path: Path, command: Command, words: tuple[str, ...], subject: str, text: str
) -> None:
    status, out, err = command(*CHECK, f"runs_dir={tmp_path}", *words)
    assert status == 1
    assert err.endswith(f"task=check: the run cannot start: {subject}\n")
    assert text in " ".join(out.split())
    assert list(tmp_path.iterdir()) == []
