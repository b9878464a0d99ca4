"""retention.json: the same whoever draws the first prompts, and whole or not there."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.config import ConfigError
from kvbench.core.segments import ModelSpec, next_token_image
from kvbench.runs import execute
from kvbench.runs.generate.retention import FILE, MAX_BINS, list_sources, read_retention
from tests.support.fake_run import SPEC, job_in
from tests.support.small_models import small_writer


def test_a_run_tells_what_its_first_batch_kept(whole: Path) -> None:
    found = read_retention(whole)
    assert (found.segment, found.prompts) == (3, 2)
    assert (found.sources, found.tokens) == (("1x1", "2x2", "3x3"), (1, 4, 9))
    held = [
        [sum(share * n for share, n in zip(head, found.tokens, strict=True)) for head in layer]
        for layer in found.kept
    ]
    memory = json.loads((whole / "results.json").read_text())["memory"]
    assert sum(map(sum, held)) == pytest.approx(memory["last_tokens"], abs=1e-4)
    [reference] = whole.parent.glob("full-*")
    full = read_retention(reference)
    assert {share for layer in full.kept for head in layer for share in head} == {1.0}


def test_texts_that_end_early_tell_what_was_held_then(tmp_path: Path) -> None:
    model = small_writer(max_tokens=800)
    found = read_retention(execute.run(job_in(tmp_path, model=model, count=2, batch_size=2)).folder)
    records = (tmp_path / "small").rglob("samples.jsonl")
    longest = max(json.loads(line)["tokens"] for path in records for line in path.read_text().splitlines())
    assert 4 < longest < 800 - 16
    assert 0 < found.segment < len(model.spec.segments) - 1
    assert found.sources[0] == "prompt"
    assert sum(found.tokens[1:]) == model.spec.segments[found.segment].start - 4


@given(
    prompt=st.integers(1, 9), tokens=st.integers(2, 400), chunk=st.integers(1, 40), line=st.integers(0, 20)
)
def test_sources_cover_what_came_before(prompt: int, tokens: int, chunk: int, line: int) -> None:
    spec = ModelSpec("small", 1, 1, 8, next_token_image(prompt, tokens, chunk), line=line)
    for running in spec.segments[1:]:
        sources = list_sources(spec, running)
        assert [source.start for source in sources] == [0, *(source.stop for source in sources[:-1])]
        assert sources[-1].stop == running.start
        assert len({source.label for source in sources}) == len(sources)
        assert all(source.start < source.stop for source in sources)
        assert line or len(sources) <= MAX_BINS
    assert list_sources(spec, spec.segments[0]) == []
    assert list_sources(SPEC, SPEC.segments[0]) == []


@pytest.mark.parametrize("change", [{"kept": [[[0.5]]]}, {"schema_version": 2}, {"segment": "last"}])
def test_damage_is_told_in_a_line(tmp_path: Path, whole: Path, change: dict[str, object]) -> None:
    values = json.loads((whole / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**values, **change}))
    with pytest.raises(ConfigError, match=r"retention\.json: damaged \(.*\); delete it"):
        read_retention(tmp_path)
