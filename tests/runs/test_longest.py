"""Protected prompts at budgets below the room for prompts: a run counts the tokens of its own."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.core.budget import InfeasibleBudget
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.lazy_eviction import LazyEviction
from kvbench.methods.shared.base import Method
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.prompts.base import Prompt
from kvbench.runs import execute
from kvbench.runs.check import check_job
from kvbench.runs.job import Job
from tests.support.fake_run import job_in
from tests.support.small_models import small_writer

PROMPTS = [
    Prompt(0, "two words"),
    Prompt(1, "four words of one"),
    Prompt(2, "one of three"),
    Prompt(3, "one"),
]
BUDGET, ROOM = 6, 12
"""Tokens of a head: more than the longest prompt, fewer than the model reads."""


def job(root: Path, method: Method, room: int = ROOM, **more: Any) -> Job:
    model = replace(small_writer(20), prompt_tokens=room, **more.pop("settings", {}))
    return job_in(
        root, model=model, method=method, prompts=PROMPTS, evaluators={}, **{"budget": BUDGET, **more}
    )


def read(folder: Path) -> list[dict[str, object]]:
    """Records without times, with their texts."""
    lines = (folder / "samples.jsonl").read_text().splitlines()
    texts = [path.read_text() for path in sorted((folder / "texts").iterdir())]
    return [
        {
            **{key: value for key, value in json.loads(line).items() if key not in ("seconds", "load")},
            "text": text,
        }
        for line, text in zip(lines, texts, strict=True)
    ]


def test_a_run_is_the_same_in_a_room_above_its_budget(tmp_path: Path) -> None:
    exact = execute.run(job(tmp_path / "exact", H2O(sinks=1), room=4))  # of the longest prompt
    found = execute.run(job(tmp_path / "found", H2O(sinks=1)))
    assert read(found.folder) == read(exact.folder)
    assert found.results.memory.peak_tokens == found.results.memory.budget_tokens == BUDGET
    retention = [json.loads((one.folder / "retention.json").read_text()) for one in (found, exact)]
    assert retention[0] == retention[1]
    assert retention[0]["kept"][0][0][0] == 1  # the prompts
    fewer = replace(job(tmp_path / "found", H2O(sinks=1)), prompts=PROMPTS[:3])
    assert "taken" not in json.loads((execute.run(fewer).folder / "provenance.json").read_text())


def test_a_prompt_above_the_budget_is_named_before_any_work(tmp_path: Path) -> None:
    for remedy, sinks in {"sinks=0": 1, "method.sinks=0": 0}.items():
        one = job(tmp_path, StreamingLLM(sinks=1), budget=3, sinks=sinks)
        with pytest.raises(InfeasibleBudget) as caught:
            execute.run(one)
        assert str(caught.value) == (
            "prompt 1: 'four words of one' has 4 tokens; budget=3: the tokens of the longest prompt, which "
            f"{remedy[:-1]}1 keeps, need 4 of 20 tokens per head; the smallest feasible budget is 4, or set {remedy}"
        )
    with pytest.raises(InfeasibleBudget, match=r"^prompt 1: .* 4 tokens; budget=6: .* 9 .*, or set sinks=0$"):
        execute.run(job(tmp_path, LazyEviction(sinks=1)))
    assert list(tmp_path.iterdir()) == []


def test_the_longest_prompt_has_the_most_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the most characters: a token is a vowel here."""
    one = job(tmp_path, StreamingLLM(sinks=1))
    assert replace(one, method=Full()).longest is None
    prompts = [Prompt(0, "rhythms of crypts"), Prompt(1, "aerie"), Prompt(2, "queue")]

    def count(_: object, texts: list[str]) -> list[int]:
        return [sum(letter in "aei" for letter in text) for text in texts]

    monkeypatch.setattr(type(one.model), "count_prompt_tokens", count)
    assert replace(one, prompts=prompts).longest == (prompts[1], 4)


@pytest.mark.parametrize(
    "more", [{"settings": {"count_padding": True}}, {"budget_unit": "bytes", "budget": 400}]
)
def test_padding_that_counts_and_bytes_need_the_whole_room(more: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InfeasibleBudget, match=r"^budget=.*: .* the longest prompt, model\.prompt_tokens=12"):
        check_job(job(tmp_path, H2O(sinks=1), **more))
